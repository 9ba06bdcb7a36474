"""What quantized activations look like against their grids."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from versatil_core import quantize
from versatil_core.activation_ranges import BINS, RangeRecorder
from versatil_core.export import ModelInputs
from versatil_core.layer_accuracy import graph_errors
from versatil_core.layer_report import ActivationRange


def ranges(reference: GraphModule, model: nn.Module, *batches: torch.Tensor) -> Any:
    return graph_errors(model, reference, [ModelInputs((x,), {}) for x in batches]).ranges


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def test_the_grid_is_the_one_in_the_reference(model: nn.Module, linear_backend: Any) -> None:
    x = torch.rand(64, 8) * 4 - 1
    reference = quantize(model, x, linear_backend(), [x])

    first, second = ranges(reference, model, x)

    node = next(n for n in reference.graph.nodes if n.name == first.node)
    assert [first.scale, first.zero_point, first.quant_min, first.quant_max] == [*node.args[1:5]]
    assert first.grid_low == pytest.approx(-first.zero_point * first.scale)
    assert first.grid_high - first.grid_low == pytest.approx(127 * first.scale)
    assert (first.readers, second.readers) == (("0",), ("2",))
    assert (first.channels, second.channels) == (8, 8)


def test_values_are_counted_over_all_batches(model: nn.Module, linear_backend: Any) -> None:
    x = torch.rand(64, 8)
    x[0, :2] = torch.tensor([0.0, 1.0])  # so that calibration sees both ends
    reference = quantize(model, x, linear_backend(), [x])
    other = torch.full((64, 8), 0.5)
    other[0, 0] = 3.0  # one of 1024 values, far beyond the grid
    other[0, 1] = -2.0

    [first, _] = ranges(reference, model, x, other)

    assert (first.minimum, first.maximum) == (-2.0, 3.0)
    assert first.clipped_share == pytest.approx(2 / 1024)
    assert sum(first.histogram) == 1024
    assert len(first.histogram) == BINS
    seen = torch.cat([x, other]).double().flatten()
    for percent, value in first.percentiles.items():
        assert value == pytest.approx(float(torch.quantile(seen, float(percent) / 100)), abs=1e-6)
    assert first.used_share == pytest.approx(1.0)


def test_values_that_round_onto_the_grid_are_not_clipped() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    target = torch.ops.quantized_decomposed.quantize_per_tensor.default
    node = graph.call_function(target, (x, 0.5, 0, 0, 10, torch.uint8))
    graph.output(node)
    recorder = RangeRecorder(GraphModule(nn.Module(), graph))

    # The grid is 0 to 5; what is within half a step beyond rounds to its ends.
    recorder.observe(node, torch.tensor([-0.24, 5.24, -0.26, 5.26]))
    [found] = recorder.ranges()

    assert found.clipped_share == 0.5
    assert found.channels == 0


def test_outlier_channels(model: nn.Module, linear_backend: Any) -> None:
    x = torch.randn(64, 8).clamp(-2, 2)
    x[:, 5] *= 30
    reference = quantize(model, x, linear_backend(), [x])

    first, second = ranges(reference, model, x)

    assert first.outlier_channels == (5,)
    assert second.outlier_channels == ()


def test_one_value_that_several_read_is_one_entry(linear_backend: Any) -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) + self.right(x)

    x = torch.randn(4, 8)
    reference = quantize(Twins().eval(), x, linear_backend(), [x])

    [found] = ranges(reference, Twins().eval(), x)

    assert found.readers == ("left", "right")


@pytest.mark.parametrize(
    ("seen", "used"), [((0.0, 1.27), 1.0), ((0.0, 0.127), 0.1), ((-5.0, 5.0), 1.0), ((2, 3), 0.0)]
)
def test_used_share(seen: tuple[float, float], used: float) -> None:
    found = ActivationRange("q", (), 0.01, 0, 0, 127, *seen, {}, 0.0, ())
    assert found.used_share == pytest.approx(used)


def recorder_for(conv: torch._ops.OpOverload) -> tuple[RangeRecorder, torch.fx.Node]:
    qd = torch.ops.quantized_decomposed
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    node = graph.call_function(qd.quantize_per_tensor.default, (x, 1.0, 0, 0, 255, torch.uint8))
    back = graph.call_function(
        qd.dequantize_per_tensor.default, (node, 1.0, 0, 0, 255, torch.uint8)
    )
    graph.output(graph.call_function(conv, (back, weight)))
    return RangeRecorder(GraphModule(nn.Module(), graph)), node


def test_a_sample_does_not_step_over_channels() -> None:
    """A step that is a multiple of the channels would see one channel only."""
    recorder, node = recorder_for(torch.ops.aten.linear.default)
    x = torch.zeros(1 << 18, 4)
    x[:, 1] = 100.0

    recorder.observe(node, x)
    [found] = recorder.ranges()

    assert found.percentiles["99"] == 100.0
    assert found.histogram[-1] == pytest.approx(sum(found.histogram) / 4, rel=0.02)
    assert found.outlier_channels == ()  # the others are all zero: nothing to compare with


@pytest.mark.parametrize("shape", [(2, 3, 8, 16), (3, 8, 16)], ids=["batch", "no batch"])
def test_channels_of_a_convolution(shape: tuple[int, ...]) -> None:
    recorder, node = recorder_for(torch.ops.aten.conv2d.default)
    recorder.observe(node, torch.rand(shape))
    assert recorder.ranges()[0].channels == 3


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_left_out(wrong: float) -> None:
    recorder, node = recorder_for(torch.ops.aten.linear.default)
    recorder.observe(node, torch.tensor([[1.0, wrong, 3.0]]))
    recorder.observe(node, torch.tensor([[wrong] * 3]))

    [found] = recorder.ranges()

    assert (found.minimum, found.maximum) == (1.0, 3.0)
    assert sum(found.histogram) == 2
