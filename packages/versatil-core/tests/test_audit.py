"""Every layer is in the audit: with its int8 kernel, or with the reason why it has none."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from versatil_core import Audit, LoweringError, QuantizationTarget, audit, lower, quantize

Backend = Callable[..., Any]


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(10, 8)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.shared = torch.nn.Linear(8, 8)
        self.conv = torch.nn.Conv1d(4, 4, 3)
        self.skipped = torch.nn.Linear(6, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.relu(block(x))
        x = self.shared(torch.tanh(self.shared(x)))
        x = x @ x.transpose(1, 2) @ x
        return self.skipped(self.conv(x))


ORDER = ["embed", "blocks.0", "blocks.1", "shared", "shared", "", "", "conv", "skipped"]
INT8 = ["blocks.0", "blocks.1", "shared", "shared"]


@pytest.fixture
def backend(linear_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a backend whose kernels also apply relu."""
    made = linear_backend()
    rules = dataclasses.replace(
        made.lowering_rules, post_ops={"linear": frozenset({"relu"})}, machine_types=("x86_64",)
    )
    monkeypatch.setattr(linear_backend, "lowering_rules", rules)
    return made


@pytest.fixture
def reference(backend: Any) -> GraphModule:
    """Return the mixed model, quantized but for one layer."""
    tokens = torch.arange(8).reshape(2, 4)
    targets = [QuantizationTarget(path, backend) for path in ("blocks", "shared")]
    return quantize(Mixed(), tokens, targets, [tokens])


def test_every_layer_is_listed_in_the_order_of_the_calls(
    reference: GraphModule, backend: Any
) -> None:
    result = audit(reference, backend)

    assert [layer.module_path for layer in result.layers] == ORDER
    assert [layer.module_path for layer in result.layers if layer.is_int8] == INT8
    assert result.backend == "test_linear"
    assert result.int8_count == 4
    assert [layer.op for layer in result.float_layers] == [
        "embedding",
        "matmul",
        "matmul",
        "conv1d",
        "linear",
    ]
    names = {node.name for node in reference.graph.nodes}
    assert {layer.node for layer in result.layers} <= names
    assert len({layer.node for layer in result.layers}) == len(ORDER)


def test_a_layer_has_a_kernel_or_a_reason(reference: GraphModule, backend: Any) -> None:
    result = audit(reference, backend)

    for layer in result.layers:
        assert (layer.kernel is None) is not layer.is_int8
        assert (layer.output_dtype is None) is not layer.is_int8
        assert (layer.reason is None) is layer.is_int8
    reasons = {layer.module_path: layer.reason for layer in result.float_layers}
    assert "did not annotate" in str(reasons["skipped"])
    assert "no int8 kernel for conv1d" in str(reasons["conv"])
    assert "embedding" in str(reasons["embed"])


def test_an_int8_layer_says_what_its_kernel_also_does(reference: GraphModule, backend: Any) -> None:
    layers = [layer for layer in audit(reference, backend).layers if layer.is_int8]

    assert {layer.kernel for layer in layers} == {"onednn.qlinear_pointwise"}
    assert [layer.post_ops for layer in layers] == [("relu",), ("relu",), (), ()]
    outputs = [layer.output_dtype for layer in layers]
    assert outputs == ["uint8", "uint8", "float32", "float32"]


def test_it_says_the_same_as_lower(reference: GraphModule, backend: Any) -> None:
    record = lower(reference, backend).meta["versatil_lowering"]
    result = audit(reference, backend)

    assert [op.node for op in record.lowered] == [
        layer.node for layer in result.layers if layer.is_int8
    ]
    assert [(op.node, op.reason) for op in record.declined] == [
        (layer.node, layer.reason) for layer in result.float_layers
    ]


def test_it_is_json(reference: GraphModule, backend: Any) -> None:
    values = json.loads(json.dumps(audit(reference, backend).to_dict()))

    assert values["backend"] == "test_linear"
    assert (values["int8_count"], values["layer_count"]) == (4, 9)
    assert [layer["module_path"] for layer in values["layers"]] == ORDER
    assert values["layers"][1]["post_ops"] == ["relu"]
    assert values["layers"][1]["reason"] is None


def test_the_table_names_every_layer_and_reason(reference: GraphModule, backend: Any) -> None:
    result = audit(reference, backend)

    lines = str(result).splitlines()

    assert lines[0].strip() == "4 of 9 layers int8 (test_linear)"
    assert max(map(len, lines)) <= 100
    rows = [[cell.strip() for cell in line.split("│")] for line in lines[3:]]
    # A matrix product belongs to no module: its node stands for it.
    names = [layer.module_path or layer.node for layer in result.layers]
    assert [row[0] for row in rows if row[0] in names] == names
    assert sum(row[2] == "int8" for row in rows if row[0] in names) == 4
    words = " ".join(row[-1] for row in rows).split()
    assert "linear + relu -> uint8" in " ".join(words)
    assert "the quantizer did not annotate this layer" in " ".join(words)


def test_an_empty_audit_prints() -> None:
    assert "0 of 0 layers int8 (none)" in str(Audit("none", ()))


def test_it_works_on_every_machine(
    reference: GraphModule, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = audit(reference, backend)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    assert audit(reference, backend) == here


def test_a_float_model_is_no_reference(backend: Any) -> None:
    with pytest.raises(LoweringError, match="not a Mixed"):
        audit(Mixed(), backend)  # type: ignore[arg-type]


def test_a_lowered_graph_is_no_reference(reference: GraphModule, backend: Any) -> None:
    """Nothing is left in it to find: the audit would be empty."""
    with pytest.raises(LoweringError, match="lowered already"):
        audit(lower(reference, backend), backend)
