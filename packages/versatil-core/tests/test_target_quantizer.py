"""Exactly what the targets select is quantized."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from versatil_core import (
    NothingQuantizedError,
    QuantizationTarget,
    audit,
    load,
    quantize,
    reference_info,
    save,
)
from versatil_core.audit import unselected_reason
from versatil_core.reference_info import TargetInfo

Backend = Callable[..., Any]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(8, 8)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
        self.out = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.mlp(x + self.attention(x)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(2)])
        self.conv = torch.nn.Conv1d(8, 8, 1)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
ALL = [f"layers.{i}.{name}" for i in range(2) for name in ("attention", "mlp.0", "out")] + ["head"]


def quantized(targets: Any, *, strict: bool = False) -> GraphModule:
    return quantize(Model(), X, targets, [X], strict=strict)


def int8(backend: Any, *targets: QuantizationTarget, strict: bool = False) -> list[str]:
    layers = audit(quantized(targets, strict=strict), backend).layers
    return [layer.module_path for layer in layers if layer.is_int8]


@pytest.mark.parametrize("strict", [False, True])
def test_a_pattern(linear_backend: Backend, *, strict: bool) -> None:
    backend = linear_backend()

    found = int8(backend, QuantizationTarget("layers.*.mlp", backend), strict=strict)

    assert found == ["layers.0.mlp.0", "layers.1.mlp.0"]


@pytest.mark.parametrize("strict", [False, True])
def test_exclusions(linear_backend: Backend, *, strict: bool) -> None:
    backend = linear_backend()
    target = QuantizationTarget("", backend, exclude=["layers.*.out", "head"])

    assert int8(backend, target, strict=strict) == [
        path for path in ALL if not path.endswith(("out", "head"))
    ]


def test_all_is_what_a_backend_alone_does(linear_backend: Backend) -> None:
    backend = linear_backend()

    assert int8(backend, QuantizationTarget("", backend)) == ALL


def test_operators_keep_others_float(linear_backend: Backend) -> None:
    backend = linear_backend()
    with pytest.raises(NothingQuantizedError, match=r"looked for conv1d.*aten\.linear") as error:
        quantized(QuantizationTarget("", backend, operators=["linear", "conv1d"]))
    assert error.value.looked_for == ("conv1d",)

    reference = quantized(QuantizationTarget("", backend, operators=["linear"]))

    reasons = {layer.op: layer.reason for layer in audit(reference, backend).float_layers}
    assert list(reasons) == ["conv1d"]


def test_everything_excluded_is_an_error(linear_backend: Backend) -> None:
    backend = linear_backend()
    with pytest.raises(NothingQuantizedError, match="nothing to quantize in the model"):
        quantized(QuantizationTarget("", backend, exclude=["layers", "head"]))


def test_static_and_dynamic_with_an_exclusion(linear_backend: Backend) -> None:
    """Two recipes in one model, where one is everything but the other."""
    static, dynamic = linear_backend(), linear_backend(is_dynamic=True)
    reference = quantized(
        [
            QuantizationTarget("", static, exclude=["layers.*.mlp"]),
            QuantizationTarget("layers.*.mlp", dynamic),
        ]
    )

    names = [str(node.target) for node in reference.graph.nodes]
    assert sum("choose_qparams" in name for name in names) == 2
    assert sum("dequantize_per_channel" in name for name in names) == len(ALL)
    audited = audit(reference, static)
    assert [layer.module_path for layer in audited.layers if layer.is_int8] == ALL


def test_a_foreign_quantizers_annotations_are_taken_back(linear_backend: Backend) -> None:
    """The test backend's quantizer writes over annotations that it finds."""
    backend = linear_backend()
    reference = quantized(QuantizationTarget("layers", backend, exclude=["layers.0"]))

    assert [layer.module_path for layer in audit(reference, backend).layers if layer.is_int8] == [
        path for path in ALL if path.startswith("layers.1")
    ]


def test_reasons(linear_backend: Backend) -> None:
    backend = linear_backend()
    reference = quantized(
        QuantizationTarget("layers", backend, exclude=["layers.0.out"], operators=["linear"])
    )

    reasons = {layer.module_path: layer.reason for layer in audit(reference, backend).float_layers}

    assert reasons["layers.0.out"] == "it is excluded from what was quantized: 'layers'"
    assert reasons["head"] == "it is outside what was quantized: 'layers'"


def test_a_target_that_selects_a_layer_goes_before_one_that_excludes_it() -> None:
    rest = TargetInfo("", "fake", {}, exclude=("head",), operators=("linear",))
    head = TargetInfo("head", "fake", {})

    assert unselected_reason([rest, head], ["", "head"], "linear") == ""
    assert unselected_reason([head, rest], ["", "head"], "linear") == ""
    assert "excluded" in unselected_reason([rest], ["", "head"], "linear")
    assert "only linear" in unselected_reason([rest, head], ["", "body"], "conv1d")
    assert unselected_reason([], ["", "body"], "conv1d") == ""


def test_a_saved_reference_keeps_its_targets(linear_backend: Backend, tmp_path: Any) -> None:
    backend = linear_backend()
    reference = quantized(QuantizationTarget("layers.*", backend, ["layers.*.out"], ["linear"]))

    save(reference, tmp_path / "model.pt2")
    [target] = reference_info(load(tmp_path / "model.pt2")).targets

    assert (target.module_path, target.exclude, target.operators) == (
        "layers.*",
        ("layers.*.out",),
        ("linear",),
    )
