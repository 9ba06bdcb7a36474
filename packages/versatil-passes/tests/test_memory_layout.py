"""Convolution kernels write channels last; nobody may get other values, or other strides, for it."""

from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the quantized_decomposed ops
from torch.fx import GraphModule

from versatil_passes import Int8Lowering, LoweringRules, OneDNNKernels

qd = torch.ops.quantized_decomposed
RULES = LoweringRules(("x86_64",))


class QuantizedConv(torch.nn.Module):
    """An int8 convolution, and something behind it."""

    def __init__(self, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("weight", torch.randint(-99, 99, (4, 3, 3, 3), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(4) / 50 + 0.01)
        self.register_buffer("zero_points", torch.zeros(4, dtype=torch.int64))
        self.behind = behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = qd.quantize_per_tensor(x, 0.05, 60, 0, 127, torch.uint8)
        x = qd.dequantize_per_tensor(x, 0.05, 60, 0, 127, torch.uint8)
        weight = qd.dequantize_per_channel(
            self.weight, self.scales, self.zero_points, 0, -128, 127, torch.int8
        )
        return self.behind(torch.nn.functional.conv2d(x, weight))


def lowered_pair(
    behind: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[GraphModule, GraphModule, Int8Lowering]:
    """The reference, its lowered form, and the pass with its record."""
    model = QuantizedConv(behind)
    reference = torch.export.export(model, (x,)).module()
    lowered = torch.export.export(model, (x,)).module()
    assert isinstance(reference, GraphModule)
    assert isinstance(lowered, GraphModule)
    lowering = Int8Lowering(RULES)
    lowering(lowered.graph)
    OneDNNKernels(allow_in_place=False)(lowered.graph)
    lowered.recompile()
    return reference, lowered, lowering


@pytest.mark.parametrize(
    "behind",
    [
        lambda y: y.as_strided((2, 64), (64, 1)),
        lambda y: y.relu().as_strided((2, 8), (64, 3)),
        lambda y: torch.view_as_complex(y.view(2, 4, 4, 2, 2)).abs(),
        lambda y: y.view(torch.int32),
    ],
    ids=["as_strided", "behind_relu", "view_as_complex", "view_dtype"],
)
def test_a_convolution_whose_layout_is_read_stays_float(
    behind: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.randn(2, 3, 6, 6)

    reference, lowered, lowering = lowered_pair(behind, x)

    assert [op.reason for op in lowering.record.declined] == [
        "an op behind it depends on the memory layout, which the kernel changes"
    ]
    assert torch.equal(lowered(x), reference(x))


def test_a_written_view_of_a_convolution_is_seen() -> None:
    x = torch.randn(2, 3, 6, 6)

    def behind(y: torch.Tensor) -> torch.Tensor:
        y.view(2, -1).mul_(2)
        return y

    reference, lowered, lowering = lowered_pair(behind, x)

    assert len(lowering.record.declined) == 1
    assert torch.equal(lowered(x), reference(x))


def test_a_layer_in_between_does_not_care() -> None:
    x = torch.randn(2, 3, 6, 6)
    linear = torch.nn.Linear(4, 4)

    _, _, lowering = lowered_pair(lambda y: linear(y).as_strided((2, 4), (4, 1)), x)

    assert [op.op for op in lowering.record.lowered] == ["conv2d"]


def test_results_have_the_strides_of_the_reference() -> None:
    x = torch.randn(2, 3, 6, 6)

    reference, lowered, lowering = lowered_pair(lambda y: y.relu() * 2, x)

    assert len(lowering.record.lowered) == 1
    assert lowered(x).stride() == reference(x).stride()
    assert lowered(x).view(2, -1).shape == (2, 64)


def test_an_input_without_a_batch_is_declined() -> None:
    x = torch.randn(3, 6, 6)

    reference, lowered, lowering = lowered_pair(torch.relu, x)

    assert lowering.record.declined[0].reason.startswith("its input has no batch dimension")
    assert torch.equal(lowered(x), reference(x))
