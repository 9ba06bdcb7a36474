"""Where the error comes from: what each layer adds, and what has come together."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from versatil_core import load, quantize, save, sqnr_db
from versatil_core.export import ModelInputs
from versatil_core.float_graph import float_graph, matching_nodes
from versatil_core.layer_accuracy import graph_errors


class Residual(nn.Module):
    """Two linears, one of them with an input that the other has spoiled; and one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        return self.second(torch.relu(hidden)) + hidden


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Residual().eval()


def call(*args: torch.Tensor) -> ModelInputs:
    return ModelInputs(args, {})


def by_hand(model: Any, reference: torch.fx.GraphModule, x: torch.Tensor) -> dict[str, float]:
    """The same numbers from the definition: the reference's layers with their own weights."""

    def int8(name: str, value: torch.Tensor, quantize_node: str) -> torch.Tensor:
        node = next(n for n in reference.graph.nodes if n.name == quantize_node)
        _, scale, zero_point, low, high, _ = node.args
        on_grid = (torch.round(value / scale) + zero_point).clamp(low, high)
        weight = reference.get_buffer(f"{name}.weight").float()
        scales = reference.get_buffer(f"{name}.weight_scale")
        bias = getattr(model, name).bias
        return nn.functional.linear(
            (on_grid - zero_point) * scale, weight * scales[:, None].float(), bias
        )

    first, second = "quantize_per_tensor_default", "quantize_per_tensor_default_1"
    hidden = model.first(x)
    own = int8("first", x, first)
    out = int8("second", torch.relu(hidden), second)
    wanted = model.second(torch.relu(hidden))
    return {
        "first": sqnr_db(own, hidden),
        "second introduced": sqnr_db(out, wanted),
        "second accumulated": sqnr_db(int8("second", torch.relu(own), second), wanted),
    }


def test_introduced_and_accumulated(model: nn.Module, linear_backend: Any) -> None:
    x = torch.randn(32, 16)
    reference = quantize(model, x, linear_backend(), [x])

    nodes = graph_errors(model, reference, [call(x)]).nodes

    expected = by_hand(model, reference, x)
    first, second = nodes["linear"], nodes["linear_1"]
    assert first.introduced.db == pytest.approx(expected["first"], abs=1e-3)
    # Nothing came before it.
    assert first.accumulated.db == pytest.approx(expected["first"], abs=1e-3)
    assert second.introduced.db == pytest.approx(expected["second introduced"], abs=1e-3)
    assert second.accumulated.db == pytest.approx(expected["second accumulated"], abs=1e-3)
    assert second.accumulated.db < second.introduced.db
    # The sum is float in both: it adds nothing, and has what came together.
    assert nodes["add"].introduced.db == math.inf
    assert nodes["add"].accumulated.db < 60


def test_batches_add_up(model: nn.Module, linear_backend: Any) -> None:
    batches = torch.randn(2, 32, 16)
    reference = quantize(model, batches[0], linear_backend(), [batches[0]])
    seen: list[None] = []

    both = graph_errors(
        model, reference, [*map(call, batches)], on_batch=lambda: seen.append(None)
    ).nodes["linear_1"]

    apart = [graph_errors(model, reference, [call(x)]).nodes["linear_1"] for x in batches]
    assert len(seen) == 2
    assert both.introduced.noise == pytest.approx(sum(each.introduced.noise for each in apart))
    assert both.accumulated.signal == pytest.approx(sum(each.accumulated.signal for each in apart))


def test_a_loaded_reference_gives_the_same(
    model: nn.Module, linear_backend: Any, tmp_path: Any
) -> None:
    x = torch.randn(8, 16)
    reference = quantize(model, x, linear_backend(), [x])
    save(reference, tmp_path / "model.pt2")

    loaded = graph_errors(model, load(tmp_path / "model.pt2"), [call(x)])

    assert loaded.nodes == graph_errors(model, reference, [call(x)]).nodes


def test_the_model_and_its_inputs_are_left_alone(linear_backend: Any) -> None:
    class Writes(nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            hidden: torch.Tensor = self.linear(x)
            return hidden.relu_() + self.calls

    writing, x = Writes().eval(), torch.randn(8, 16)
    reference = quantize(writing, x, linear_backend(), [x])
    before = x.clone()

    nodes = graph_errors(writing, reference, [call(x), call(x)]).nodes

    assert nodes["linear"].introduced.db > 20
    assert torch.equal(x, before)
    assert writing.calls == 0


def test_a_convolution_is_compared_with_its_batch_norm_folded(linear_backend: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)
    ).eval()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    norm.running_mean.normal_()
    x = torch.randn(3, 2, 4, 4)
    reference = quantize(model, x, linear_backend(), [x])

    nodes = graph_errors(model, reference, [call(x)]).nodes

    # This backend leaves convolutions float: what is left is rounding.
    assert nodes["conv2d"].introduced.db > 100
    assert 20 < nodes["linear"].introduced.db < 70


def test_dynamic_sizes(model: nn.Module, linear_backend: Any) -> None:
    batch = torch.export.Dim("batch")
    reference = quantize(
        model, torch.randn(4, 16), linear_backend(is_dynamic=True), dynamic_shapes=({0: batch},)
    )

    errors = graph_errors(model, reference, [call(torch.randn(4, 16)), call(torch.randn(7, 16))])

    assert 20 < errors.nodes["linear_1"].introduced.db < 60
    assert errors.ranges == ()  # the scales are measured at every call


def test_nodes_without_a_counterpart_are_left_out(model: nn.Module, linear_backend: Any) -> None:
    x = torch.randn(8, 16)
    reference = quantize(model, x, linear_backend(), [x])

    class Other(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.tanh(x))

    of_float = float_graph(Other().eval(), reference, call(x))

    matches = matching_nodes(reference, of_float)
    assert matches == {name: name for name in ("linear", "relu", "linear_1", "add")}
