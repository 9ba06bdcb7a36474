"""Every layer is in the audit: with its int8 kernel, or with the reason why it has none."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from versatil_core import Audit, LoweringError, QuantizationTarget, audit, lower, quantize
from versatil_core.layer_quantizer import LayerQuantizer
from versatil_passes import SaturatingPairs

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
    assert reasons["skipped"] == "it is outside what was quantized: 'blocks' or 'shared'"
    assert "no int8 kernel for conv1d" in str(reasons["conv"])
    assert reasons["embed"] == reasons["skipped"]


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
    assert [op.node for op in record.declined] == [layer.node for layer in result.float_layers]
    outside = {"embed", "skipped"}  # of what the targets are; the lowering knows none
    told = {layer.reason for layer in result.float_layers if layer.module_path not in outside}
    assert {op.reason for op in record.declined if op.module_path not in outside} == told


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
    assert "it is outside what was quantized" in " ".join(words)


@pytest.fixture
def products(linear_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a backend whose kernel is a product of int8 matrices, and which quantizes convolutions too."""
    made = linear_backend()
    rules = dataclasses.replace(
        made.lowering_rules,
        ops=frozenset({"linear", "conv2d"}),
        kernels="gemm",
        allow_int8_output=False,
        kernel_class="lowp_gemm:acl",
        columns_bytes_max=3 * 9 * 20 * 20,
    )
    monkeypatch.setattr(linear_backend, "lowering_rules", rules)
    activation, weight = (
        QuantizationSpec(dtype=dtype, qscheme=qscheme, observer_or_fake_quant_ctr=MinMaxObserver)
        for dtype, qscheme in (
            (torch.uint8, torch.per_tensor_affine),
            (torch.int8, torch.per_tensor_symmetric),
        )
    )
    config = QuantizationConfig(activation, activation, weight, None, is_qat=False)
    monkeypatch.setattr(linear_backend, "create_quantizer", lambda *_: LayerQuantizer(config))
    return made


def test_kernel_class_and_columns(products: Any) -> None:
    """Of a convolution as a product of matrices, the memory of what its kernel covers."""
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1), torch.nn.Linear(20, 5)
    small, large = torch.randn(1, 3, 22, 22), torch.randn(1, 3, 22, 23)
    model = torch.nn.Sequential(*layers)

    result = audit(quantize(model, small, products, [small]), products)

    shown = [(layer.kernel_class, layer.columns_bytes) for layer in result.layers]
    assert shown == [("lowp_gemm:acl", 10800), ("lowp_gemm:acl", 0), ("lowp_gemm:acl", 0)]
    values = json.loads(json.dumps(result.to_dict()))["layers"][0]
    assert (values["kernel_class"], values["columns_bytes"]) == ("lowp_gemm:acl", 10800)
    words = " ".join(str(result).replace("│", " ").split())
    assert "conv2d -> float32, lowp_gemm:acl, 11 kB of columns an image" in words
    assert words.count("columns an image") == 1
    assert words.count("linear -> float32, lowp_gemm:acl") == 1

    model[2] = torch.nn.Linear(21, 5)
    first = audit(quantize(model, large, products, [large]), products).layers[0]
    assert (first.is_int8, first.kernel_class, first.columns_bytes) == (False, "", 0)
    assert "more than the backend allows" in str(first.reason)


def test_without_a_kernel_class_nothing_is_said(reference: GraphModule, backend: Any) -> None:
    result = audit(reference, backend)
    assert {(layer.kernel_class, layer.columns_bytes) for layer in result.layers} == {("", 0)}
    assert "columns" not in str(result)
    assert "float32," not in str(result)


def test_an_empty_audit_prints() -> None:
    assert "0 of 0 layers int8 (none)" in str(Audit("none", ()))


REASONS = {"quant_max": "the CPU [of 2013] likes it"}


@pytest.fixture
def pairs(backend: Any, linear_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the kernels saturate above 254 = 32512 // 128, and the backend tell a reason."""
    made = SaturatingPairs(32512, uncut_features=256, cause="This CPU is old", remedy="Buy another")
    rules = dataclasses.replace(backend.lowering_rules, saturating_pairs=made)
    monkeypatch.setattr(linear_backend, "lowering_rules", rules)
    monkeypatch.setattr(linear_backend, "option_reasons", property(lambda _: REASONS))
    return made


def two_layers(backend: Any, targets: Any = None) -> GraphModule:
    """Quantize ``risky``, a layer whose weights have one value, ``safe``, of alternating sign, and a float one."""
    layers: Mapping[str, torch.nn.Module] = {
        "risky": torch.nn.Linear(6, 4),
        "safe": torch.nn.Linear(4, 4),
        "last": torch.nn.Conv1d(3, 3, 1),
    }
    model = torch.nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    with torch.no_grad():
        layers["risky"].get_parameter("weight").fill_(0.5)
        layers["safe"].get_parameter("weight").copy_(torch.tensor([0.5, -0.5, 0.5, -0.5]))
    x = torch.randn(3, 6)
    return quantize(model, x, targets or backend, [x])


@pytest.mark.usefixtures("pairs")
def test_a_layer_that_may_saturate_says_so(linear_backend: Backend) -> None:
    wide = linear_backend(quant_max=255)

    result = audit(two_layers(wide), wide)

    risky, safe, last = result.layers
    assert (risky.may_saturate, risky.pair_sum, risky.pair_limit) == (True, 254, 127)
    assert (safe.may_saturate, safe.pair_sum, safe.pair_limit) == (False, 127, 127)
    assert (last.may_saturate, last.pair_sum, last.pair_limit) == (False, None, None)
    assert result.saturating_layers == (risky,)
    assert result.notes[1:] == ("1 layer may saturate here: This CPU is old. Buy another",)
    values = json.loads(json.dumps(result.to_dict()))
    assert values["may_saturate_count"] == 1
    assert values["notes"] == list(result.notes)
    kept = [(row["may_saturate"], row["pair_sum"], row["pair_limit"]) for row in values["layers"]]
    assert kept == [(True, 254, 127), (False, 127, 127), (False, None, None)]


@pytest.mark.usefixtures("pairs")
def test_the_table_shows_what_may_saturate_and_the_notes_below(linear_backend: Backend) -> None:
    wide = linear_backend(quant_max=255)

    words = " ".join(str(audit(two_layers(wide), wide)).replace("│", " ").split())

    risk = "may saturate here: a pair of weights adds up to 254, 127 is safe"
    assert words.count(risk) == 1
    assert "safe linear int8 linear -> float32 last" in words  # nothing of the kind
    assert words.endswith(
        "quantized with quant_max=255: the CPU [of 2013] likes it "
        "1 layer may saturate here: This CPU is old. Buy another"
    )


@pytest.mark.usefixtures("pairs")
def test_a_model_within_the_limit_has_no_note_about_it(linear_backend: Backend) -> None:
    narrow = linear_backend(quant_max=127)

    result = audit(two_layers(narrow), narrow)

    assert [layer.pair_limit for layer in result.layers] == [256, 256, None]
    assert result.saturating_layers == ()
    assert result.notes == ("quantized with quant_max=127: the CPU [of 2013] likes it",)


@pytest.mark.usefixtures("pairs")
def test_the_reasons_of_each_target(linear_backend: Backend) -> None:
    wide, narrow = linear_backend(quant_max=255), linear_backend(quant_max=63)
    targets = [QuantizationTarget("risky", wide), QuantizationTarget("safe", narrow)]

    notes = audit(two_layers(wide, targets), wide).notes

    assert notes[:2] == (
        "quantized with quant_max=255 in risky: the CPU [of 2013] likes it",
        "quantized with quant_max=63 in safe: the CPU [of 2013] likes it",
    )


def test_a_graph_of_torchao_alone_has_no_notes(reference: GraphModule, backend: Any) -> None:
    reference.meta.pop("versatil")

    assert audit(reference, backend).notes == ()


def test_several_layers_in_one_note(pairs: Any, linear_backend: Backend) -> None:
    wide = linear_backend(quant_max=255)
    x = torch.randn(3, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    torch.nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    torch.nn.init.ones_(model[1].weight)  # type: ignore[arg-type]

    notes = audit(quantize(model, x, wide, [x]), wide).notes

    assert notes[-1] == f"2 layers may saturate here: {pairs.cause}. {pairs.remedy}"


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
