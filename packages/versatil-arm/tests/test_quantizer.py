"""What is quantized for Arm, by strict and by non-strict export; what is not, and why."""

import itertools
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.nn import functional
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer

from versatil_arm import ArmInductorBackend
from versatil_core import NothingQuantizedError, QuantizationTarget, audit, quantize, sqnr_db

pytestmark = pytest.mark.portable

QD = torch.ops.quantized_decomposed
COMBINATIONS = [*itertools.product((True, False), ("int8", "uint8"), (False, True))]


def int8_layers(reference: GraphModule, backend: ArmInductorBackend) -> list[tuple[str, str]]:
    return [
        (layer.module_path, layer.op) for layer in audit(reference, backend).layers if layer.is_int8
    ]


@pytest.mark.parametrize(("is_per_channel", "dtype", "is_dynamic"), COMBINATIONS)
def test_strict_and_non_strict_export_give_the_same(
    model: torch.nn.Module,
    batch: torch.Tensor,
    dtype: str,
    *,
    is_per_channel: bool,
    is_dynamic: bool,
) -> None:
    """With torchao 0.15 and 0.16, non-strict export, the default, gave nothing at all."""
    backend = ArmInductorBackend(is_dynamic, False, is_per_channel, dtype)
    calibration = None if is_dynamic else [batch]

    strict, loose = (
        quantize(model, batch, backend, calibration, strict=strict) for strict in (True, False)
    )

    layers = ["strided", "dilated", "pointwise", "row", "hidden", "head"]
    ops = ["conv2d"] * 3 + ["conv1d"] + ["linear"] * 2
    assert int8_layers(loose, backend) == [*zip(layers, ops, strict=True)]
    assert int8_layers(strict, backend) == int8_layers(loose, backend)
    assert audit(loose, backend).float_layers == ()
    assert torch.equal(strict(batch), loose(batch))
    assert sqnr_db(loose(batch), model(batch)) > 20


@pytest.mark.parametrize(("is_per_channel", "dtype", "is_dynamic"), COMBINATIONS)
def test_the_graph_holds_what_was_asked_for(
    dtype: str, *, is_per_channel: bool, is_dynamic: bool
) -> None:
    x = torch.randn(3, 8)
    backend = ArmInductorBackend(is_dynamic, False, is_per_channel, dtype)

    reference = quantize(torch.nn.Linear(8, 4), x, backend, None if is_dynamic else [x])

    [layer] = reference.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    activation, weight = layer.args[:2]
    assert isinstance(activation, torch.fx.Node)
    assert isinstance(weight, torch.fx.Node)
    per_tensor = QD.dequantize_per_tensor
    assert activation.target is (per_tensor.tensor if is_dynamic else per_tensor.default)
    limits = (0, 255, torch.uint8) if dtype == "uint8" else (-128, 127, torch.int8)
    assert activation.args[3:6] == limits
    per_channel = QD.dequantize_per_channel.default
    assert weight.target is (per_channel if is_per_channel else per_tensor.default)
    assert weight.args[-3:] == (-128, 127, torch.int8)


class Groups(torch.nn.Module):
    """What is one product of matrices, and what is several or none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.grouped = torch.nn.Conv2d(8, 8, 3, groups=2)
        self.depthwise = torch.nn.Conv2d(8, 8, 3, groups=8)
        self.row = torch.nn.Conv1d(8, 8, 3, groups=4)
        self.transposed = torch.nn.ConvTranspose2d(8, 4, 2)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(self.grouped(self.conv(x)))
        y = self.row(y.flatten(2)).unflatten(2, (2, -1))
        return self.head(self.transposed(y).mean((2, 3)))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_grouped_and_transposed_convolutions_stay_float(*, is_dynamic: bool, strict: bool) -> None:
    x = torch.randn(2, 4, 8, 8)
    backend = ArmInductorBackend(is_dynamic=is_dynamic)

    reference = quantize(Groups().eval(), x, backend, None if is_dynamic else [x], strict=strict)

    reasons = {layer.module_path: layer.reason or "" for layer in audit(reference, backend).layers}
    assert reasons["conv"] == reasons["head"] == ""
    assert "2 groups" in reasons["grouped"]
    assert "8 groups" in reasons["depthwise"]
    assert "4 groups" in reasons["row"]
    assert "no int8 kernel" in reasons["transposed"]
    # Not even quantized: their numbers are those of float layers.
    dequantizes = [n for n in reference.graph.nodes if "dequantize" in str(n.target)]
    assert len(dequantizes) == 4  # activation and weight of two layers
    weights = dict(reference.named_parameters())
    for name in ("grouped", "depthwise", "row", "transposed"):
        assert weights[f"{name}.weight"].dtype is torch.float32


class Depthwise(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, groups=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("model", "found"),
    [(torch.nn.Softmax(1), "aten.softmax.int"), (Depthwise(), "aten.conv2d.default")],
)
def test_nothing_to_quantize_is_an_error_that_says_what_was_looked_for(
    model: torch.nn.Module, found: str, *, strict: bool
) -> None:
    x = torch.randn(2, 4, 8, 8)

    with pytest.raises(NothingQuantizedError) as error:
        quantize(model, x, ArmInductorBackend(), [x], strict=strict)

    assert "the model" in str(error.value)
    for op in ("linear", "conv1d", "conv2d"):
        assert op in str(error.value)
    assert found in str(error.value)
    assert found in error.value.found
    assert error.value.module_path == ""


def test_one_of_two_targets_holds_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.ReLU()))
    x = torch.randn(2, 8)
    targets = [QuantizationTarget(path, ArmInductorBackend()) for path in ("0", "1")]

    with pytest.raises(NothingQuantizedError, match="'1'") as error:
        quantize(model, x, targets, [x])

    assert error.value.module_path == "1"


@pytest.mark.parametrize("strict", [False, True])
def test_only_the_target(*, strict: bool) -> None:
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.nn.ReLU(), torch.nn.Linear(8, 8)
    )
    x, backend = torch.randn(2, 8), ArmInductorBackend()

    reference = quantize(model, x, QuantizationTarget("0", backend), [x], strict=strict)

    assert int8_layers(reference, backend) == [("0.0", "linear")]
    [layer] = audit(reference, backend).float_layers
    assert layer.reason == "it is outside what was quantized: '0'"


def test_quantizers_compose() -> None:
    """Static and dynamic, int8 and uint8, in one model."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    quantizers = [
        ArmInductorBackend(activation_dtype="uint8").create_quantizer("0"),
        ArmInductorBackend(is_dynamic=True, is_per_channel=False).create_quantizer("1"),
    ]

    prepared = prepare_pt2e(
        torch.export.export(model, (x,)).module(), ComposableQuantizer(quantizers)
    )

    observers = [type(module).__name__ for module in prepared.modules()]
    for name in ("HistogramObserver", "PlaceholderObserver", "PerChannelMinMaxObserver"):
        assert observers.count(name) == 1
    assert observers.count("MinMaxObserver") == 1


class Odd(torch.nn.Module):
    """Forms that torchao's own quantizers fail on or pass over."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = torch.nn.Linear(8, 8)
        self.weight = torch.nn.Parameter(torch.randn(8, 4, 3))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.twice(self.twice(x).relu()) + 1.0
        return functional.conv1d(y, self.weight, padding=1)


@pytest.mark.parametrize("strict", [False, True])
def test_called_twice_and_functional(*, strict: bool) -> None:
    x, backend = torch.randn(2, 4, 8), ArmInductorBackend(activation_dtype="uint8")

    reference = quantize(Odd(), x, backend, [x], strict=strict)

    assert [op for _, op in int8_layers(reference, backend)] == ["linear", "linear", "conv1d"]


def test_pools_between_layers_stay_float() -> None:
    """They have no int8 kernel here, so quantizing around them would only cost accuracy."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.AvgPool2d(2), torch.nn.Conv2d(4, 4, 1)
    )
    x = torch.randn(2, 3, 8, 8)

    reference = quantize(model, x, ArmInductorBackend(), [x])

    quantized = [node for node in reference.graph.nodes if "quantize_per_tensor" in node.name]
    assert [node.target.name() for node in quantized if "dequantize" not in node.name] == [
        "quantized_decomposed::quantize_per_tensor"
    ] * 2
