"""Outliers move from activations into weights, and the float result stays as it was."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule

from versatil_core import (
    CalibrationError,
    QuantizationTarget,
    load,
    prepare,
    quantize,
    reference_info,
    save,
    sqnr_db,
)
from versatil_core.equalization import Decision, apply_in_place, decide, scaled_nodes
from versatil_core.equalization_search import rounds_outputs_alike
from versatil_core.export import export, model_inputs
from versatil_core.layer_accuracy import graph_errors

Backend = Callable[..., Any]
WIDTH = 32


class PreNorm(nn.Module):
    """A layer norm that only two linears read; then a linear whose result passes a relu."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.norm(x)
        mixed = x + torch.tanh(self.query(read)) * torch.tanh(self.key(read))
        return x + self.down(torch.relu(self.up(mixed)))


class PostNorm(nn.Module):
    """As in BERT: what the layer norm makes is also added to the result; then comes a gelu."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + self.down(nn.functional.gelu(self.up(x)))


def with_outliers(model: Any) -> Any:
    """Make a few channels of every layer norm and of ``up`` large, as in trained transformers."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight[::11] *= 50
        if hasattr(model, "up"):
            model.up.weight[::17] *= 30
    return model.eval()


def batches(count: int = 4, rows: int = 48) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, rows, WIDTH, generator=generator) for _ in range(count)]


def decided(model: nn.Module, backend: Any, data: list[Any], **how: Any) -> Any:
    exported = export(model, data[0], **how)
    calls = [model_inputs(batch) for batch in data]
    return exported, decide(exported, prepare(exported, backend), calls)


def by_layer(decisions: tuple[Decision, ...]) -> dict[str, Any]:
    return {decision.summary.layers[0]: decision.summary for decision in decisions}


def count(module: GraphModule, name: str) -> int:
    return sum(name in str(node.target) for node in module.graph.nodes)


@pytest.mark.parametrize("strict", [True, False])
def test_factors_are_folded_into_a_layer_norm_and_a_linear(
    linear_backend: Backend, *, strict: bool
) -> None:
    model, [x, *_] = with_outliers(PreNorm()), batches()

    exported, decisions = decided(model, linear_backend(), batches(), strict=strict)
    apply_in_place(exported, decisions)

    found = by_layer(decisions)
    assert found["query"].layers == ("query", "key")
    assert (found["query"].placement, found["query"].folded_into) == ("layer norm", "norm")
    assert (found["down"].placement, found["down"].folded_into) == ("linear", "up")
    assert found["query"].gain_db > 3
    assert count(exported, "_input_factors") == 0
    assert not torch.equal(exported.get_parameter("norm.weight"), model.norm.weight)
    assert torch.equal(exported(x), model(x)), "factors are powers of two"


def test_a_second_reader_of_the_layer_norm_keeps_its_values(linear_backend: Backend) -> None:
    model, [x, *_] = with_outliers(PostNorm()), batches()

    exported, decisions = decided(model, linear_backend(), batches())
    apply_in_place(exported, decisions)

    assert by_layer(decisions)["up"].placement == "multiply"
    assert torch.equal(exported.get_parameter("norm.weight"), model.norm.weight)
    assert count(exported, "up.weight_input_factors") == 1
    assert torch.equal(exported(x), model(x))


def test_no_factor_passes_a_gelu(linear_backend: Backend) -> None:
    model = with_outliers(PostNorm())
    with torch.no_grad():
        model.down.weight[:, ::17] /= 30

    exported, decisions = decided(model, linear_backend(), batches())

    down = by_layer(decisions)["down"]
    assert down.placement == "multiply"
    assert down.gain_db >= 4, "it takes a loop of its own"
    assert torch.equal(exported.get_parameter("up.bias"), model.up.bias)


def test_a_layer_norm_without_parameters_gets_a_multiply(linear_backend: Backend) -> None:
    class Plain(PostNorm):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # The norm leaves one channel that is larger than all others.
            return self.down(self.up(self.norm(x + 20 * torch.eye(WIDTH)[3])))

    model, [x, *_] = Plain().eval(), batches()

    exported, decisions = decided(model, linear_backend(), batches())
    apply_in_place(exported, decisions)

    assert by_layer(decisions)["up"].placement == "multiply"
    assert torch.equal(exported(x), model(x))


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("kind", [PreNorm, PostNorm])
def test_quantized_is_nearer_to_float(
    linear_backend: Backend, kind: type[nn.Module], *, is_dynamic: bool
) -> None:
    """On data that it was not calibrated with; the model itself is not changed."""
    model, (x, *calibration) = with_outliers(kind()), batches(7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backend = linear_backend(is_dynamic=is_dynamic, quant_max=255)

    plain = quantize(model, x, backend, calibration)
    equalized = quantize(model, x, backend, iter(calibration), equalize=True)

    assert sqnr_db(equalized(x), model(x)) > sqnr_db(plain(x), model(x)) + 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert reference_info(plain).equalized == ()
    assert any(group.alpha is not None for group in reference_info(equalized).equalized)
    assert reference_info(equalized).calibration_batches == 6


def test_the_search_rounds_as_the_chosen_observers_do(linear_backend: Backend) -> None:
    """And as the backend's own where none is chosen: there everything stays as it was."""
    model, (x, *calibration) = with_outliers(PreNorm()), batches(5)

    def gains(observers: Any) -> list[float]:
        reference = quantize(
            model, x, linear_backend(), calibration, equalize=True, observers=observers
        )
        return [group.gain_db for group in reference_info(reference).equalized]

    *others, down = gains(None)
    *same, found = gains({"down": "min_max"})

    assert same == others
    assert 0 < found != down > 0
    assert gains("min_max")[-1] == found
    assert gains({"": "min_max", "down": "histogram"})[-1] == down


@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_encoder_layer(linear_backend: Backend, *, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, norm_first=norm_first)
    model = with_outliers(nn.Sequential(layer, nn.LayerNorm(WIDTH)))

    exported, decisions = decided(model, linear_backend(), batches())
    before = [exported(x) for x in batches()]
    apply_in_place(exported, decisions)

    found = [decision.summary for decision in decisions]
    assert [path for summary in found for path in summary.layers] == [
        "0.self_attn",
        "0.self_attn",
        "0.linear1",
        "0.linear2",
    ]
    folded = {summary.folded_into for summary in found}
    assert ("0.norm1" in folded) == norm_first, "before the projections, behind a transpose"
    for x, expected in zip(batches(), before, strict=True):
        assert torch.equal(exported(x), expected)
        assert sqnr_db(exported(x), model(x)) > 100, "torch exports another attention"


def test_dynamic_sizes(linear_backend: Backend) -> None:
    model = with_outliers(PreNorm())
    shapes = ({0: Dim("batch", max=16), 1: Dim("rows", max=64)},)
    calibration = [*batches(2, 48), *batches(2, 31)]

    exported, decisions = decided(model, linear_backend(), calibration, dynamic_shapes=shapes)
    apply_in_place(exported, decisions)

    assert by_layer(decisions)["query"].placement == "layer norm"
    x = torch.randn(3, 17, WIDTH)
    assert torch.equal(exported(x), model(x))


class Tied(PostNorm):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 64)
        self.other.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.other(x * 2).mean(-1, keepdim=True)


class CalledTwice(PostNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("kind", [Tied, CalledTwice])
def test_shared_weights_are_left_alone(linear_backend: Backend, kind: type[nn.Module]) -> None:
    model, [x, *_] = with_outliers(kind()), batches()

    exported, decisions = decided(model, linear_backend(), batches())
    apply_in_place(exported, decisions)

    shared = [d.summary for d in decisions if set(d.summary.layers) & {"up", "other"}]
    assert len(shared) == 2
    assert all(summary.reason.startswith("its weight is shared") for summary in shared)
    assert torch.equal(exported(x), model(x))


def test_an_input_that_is_written_to_is_left_alone(linear_backend: Backend) -> None:
    class Writing(PostNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            y = self.up(x)
            x.add_(1)
            return x + self.down(y)

    _, decisions = decided(with_outliers(Writing()), linear_backend(), batches())

    assert by_layer(decisions)["up"].reason == "an op writes to its input in place"


def test_a_cnn_has_nothing_to_equalize(linear_backend: Backend) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ).eval()
    data = [torch.randn(4, 1, 8, 8) for _ in range(3)]

    plain = quantize(model, data[0], linear_backend(), data)
    equalized = quantize(model, data[0], linear_backend(), data, equalize=True)

    [head] = reference_info(equalized).equalized
    assert head.reason == "its input comes out of a convolution"
    assert torch.equal(equalized(data[0]), plain(data[0]))


def test_float_layers_are_left_alone(linear_backend: Backend) -> None:
    model, data = with_outliers(PostNorm()), batches()
    target = QuantizationTarget("down", linear_backend())

    reference = quantize(model, data[0], target, data, equalize=True)

    reasons = {group.layers: group.reason for group in reference_info(reference).equalized}
    assert reasons["up",] == "none of its layers is quantized"


def test_it_needs_calibration(linear_backend: Backend) -> None:
    with pytest.raises(CalibrationError, match="equalize=True looks for outliers"):
        quantize(PostNorm(), batches()[0], linear_backend(is_dynamic=True), equalize=True)


def test_a_bad_batch_is_named(linear_backend: Backend) -> None:
    bad = [*batches(2), torch.full((2, 48, WIDTH), math.nan)]

    with pytest.raises(CalibrationError, match="calibration batch 2"):
        quantize(PostNorm(), batches()[0], linear_backend(), bad, equalize=True)


def test_one_row_is_too_little(linear_backend: Backend) -> None:
    model, x = with_outliers(PostNorm()), torch.randn(1, 1, WIDTH)

    _, decisions = decided(model, linear_backend(), [x])

    reason = "the calibration data has less than two rows for it"
    assert {d.summary.reason for d in decisions} == {reason}


def test_buffers_are_as_before(linear_backend: Backend) -> None:
    class Counting(PostNorm):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return super().forward(x)

    data = batches()

    reference = quantize(with_outliers(Counting()), data[0], linear_backend(), data, equalize=True)

    assert reference.get_buffer("calls").item() == 0


def test_layers_are_compared_on_their_own_scale(linear_backend: Backend, tmp_path: Any) -> None:
    """The float model's values don't fit the weights behind a layer norm that took factors."""
    model, (x, *data) = with_outliers(PreNorm()), batches(6)
    reference = quantize(model, x, linear_backend(quant_max=255), data, equalize=True)
    save(reference, tmp_path / "model.pt2")

    for module in (reference, load(tmp_path / "model.pt2")):
        assert reference_info(module) == reference_info(reference)
        scaled = scaled_nodes(module, reference_info(module).equalized)
        errors = graph_errors(model, module, [model_inputs(x)]).nodes

        assert scaled >= {"layer_norm", "linear_2", "relu"}
        assert errors.keys().isdisjoint(scaled)
        assert all(errors[name].introduced.db > 25 for name in ("linear", "linear_1", "linear_3"))


def test_weights_with_one_scale_take_no_factors_of_their_outputs(
    linear_backend: Backend,
) -> None:
    """A factor for an output channel would change how all others are rounded."""
    model, data = with_outliers(PreNorm()), batches()
    exported = export(model, data[0])
    prepared = prepare(exported, linear_backend())
    for module in prepared.modules():
        if getattr(module, "ch_axis", None) == 0:
            setattr(module, "qscheme", torch.per_tensor_symmetric)  # noqa: B010
    [up, *_] = prepared.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert not rounds_outputs_alike(prepared, up.args[0])
    assert rounds_outputs_alike(prepared, up), "it has no weight"
