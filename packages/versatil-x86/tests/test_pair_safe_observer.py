"""The observer that chooses pair-safe scales: by the layer's output where there is data, and safe in every case."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from versatil_core import calibrate, convert, export, lower, prepare, quantize, sqnr_db
from versatil_passes import LoweredOp
from versatil_x86 import X86InductorBackend
from versatil_x86.pair_safe_observer import PairSafePerChannelObserver
from versatil_x86.pair_safe_weights import (
    PAIRS_WITHOUT_VNNI,
    best_of,
    candidates,
    plain_scale,
    round_within_pairs,
    weight_errors,
)

SAFE = X86InductorBackend(saturation="safe")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


def observer_of(weight: Tensor) -> PairSafePerChannelObserver:
    observer = PairSafePerChannelObserver()
    assert observer(weight) is weight
    return observer


def int8_weights(reference: GraphModule) -> dict[str, Tensor]:
    return {name: value for name, value in reference.named_buffers() if value.dtype is torch.int8}


def assert_cannot_saturate(reference: GraphModule, layers: int) -> None:
    weights = int8_weights(reference)
    assert len(weights) == layers
    for weight in weights.values():
        assert (PAIRS_WITHOUT_VNNI.largest_sums(weight) <= 128).all()


def skewed(*shape: int) -> Tensor:
    """Activations as behind a relu, of very different sizes: an error in the weight is not one in the output."""
    sizes = torch.exp(2 * torch.randn(shape[1]))
    return torch.relu(torch.randn(shape)) * sizes.view(-1, *[1] * (len(shape) - 2))


Layer = Callable[[Tensor, Tensor], Tensor]
# Layer operator, its arguments behind activation and weight, the weight's shape, the activation's shape.
LAYERS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (aten.linear.default, (), {}, (24, 64), (40, 64)),
    "linear, bias": (aten.linear.default, (torch.full((24,), 9.0),), {}, (24, 64), (40, 64)),
    "linear, bias by name": (
        *(aten.linear.default, (), {"bias": torch.full((24,), 9.0)}),
        *((24, 64), (40, 64)),
    ),
    "linear, 3 dimensions": (aten.linear.default, (), {}, (24, 5), (8, 64, 5)),
    "linear, 1 dimension": (aten.linear.default, (), {}, (24, 64), (64,)),
    "linear, cut": (aten.linear.default, (), {}, (8, 261), (40, 261)),
    "conv2d": (
        *(aten.conv2d.default, (torch.full((12,), 9.0), [2, 1], [1, 0], [1, 2], 1), {}),
        *((12, 8, 3, 3), (4, 8, 9, 9)),
    ),
    "conv2d, by name": (
        *(aten.conv2d.default, (None,), {"stride": [2, 2], "groups": 2}),
        *((12, 4, 3, 3), (4, 8, 9, 9)),
    ),
    "conv2d, padding": (
        *(aten.conv2d.padding, (None, [1, 1], "same"), {}),
        *((12, 8, 3, 3), (4, 8, 9, 9)),
    ),
    "conv2d, depthwise": (
        *(aten.conv2d.default, (None, [1, 1], [0, 0], [1, 1], 8), {}),
        *((8, 1, 3, 3), (4, 8, 9, 9)),
    ),
    "conv2d, no batch": (aten.conv2d.default, (), {}, (12, 8, 3, 3), (8, 9, 9)),
    "conv1d": (
        *(aten.conv1d.default, (None, [1], [1], [1], 2), {}),
        *((12, 4, 3), (4, 8, 19)),
    ),
    "conv1d, no batch": (aten.conv1d.default, (), {}, (12, 8, 3), (8, 19)),
}


def output_errors(name: str, weight: Tensor, values: Tensor, batches: list[Tensor]) -> Tensor:
    """Squared error of the layer's output for each channel, by the difference of two outputs."""
    layer, args, kwargs, _, _ = LAYERS[name]
    total = torch.zeros(len(weight), dtype=torch.float64)
    args = tuple(v.double() if isinstance(v, Tensor) else v for v in args)
    kwargs = {k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    for x in batches:
        wanted, got = (layer(x.double(), w.double(), *args, **kwargs) for w in (weight, values))
        error = (got - wanted).square()
        is_batched = x.dim() == weight.dim()
        if name.startswith("linear"):
            total += error.flatten(0, -2).sum(0) if error.dim() > 1 else error
        else:
            total += error.movedim(1 if is_batched else 0, 0).flatten(1).sum(1)
    return total


@pytest.mark.parametrize("name", LAYERS)
def test_the_output_is_never_worse_than_with_the_plain_scale(name: str) -> None:
    layer, args, kwargs, weight_shape, x_shape = LAYERS[name]
    weight = torch.randn(weight_shape)
    batches = [skewed(x_shape[0], *x_shape[1:]) if len(x_shape) > 1 else torch.rand(x_shape)] * 2
    observer = observer_of(weight)

    for x in batches:
        observer.observe_layer(layer, (x, weight, *args), kwargs)
    got = observer.quantize(weight)

    plain = round_within_pairs(weight, plain_scale(weight, 255), 255)
    plain_errors = output_errors(name, weight, plain.dequantize(), batches)
    errors = output_errors(name, weight, got.dequantize(), batches)
    assert (errors <= plain_errors * (1 + 1e-6)).all()
    # Without pairs, or with one sample only, the plain scale may be the best one.
    assert errors.sum() < plain_errors.sum() or name in ("linear, 1 dimension", "conv2d, depthwise")
    # Of everything that was tried it is the best, in every channel.
    tried = candidates(weight, 255)
    every = torch.stack([output_errors(name, weight, c.dequantize(), batches) for c in tried])
    torch.testing.assert_close(errors, every.amin(0), rtol=1e-6, atol=0)
    assert (PAIRS_WITHOUT_VNNI.largest_sums(got.values) <= 128).all()


def test_errors_of_all_batches_count() -> None:
    weight = torch.randn(16, 32)
    batches = [skewed(20, 32) for _ in range(3)]
    observer = observer_of(weight)

    for x in batches:
        observer.observe_layer(aten.linear.default, (x, weight), {})

    whole = observer_of(weight)
    whole.observe_layer(aten.linear.default, (torch.cat(batches), weight), {})
    assert torch.equal(observer.quantize(weight).values, whole.quantize(weight).values)
    last = observer_of(weight)
    last.observe_layer(aten.linear.default, (batches[-1], weight), {})
    assert not torch.equal(observer.quantize(weight).values, last.quantize(weight).values)


def test_without_data_it_is_the_error_of_the_weight() -> None:
    weight = torch.randn(32, 64)
    tried = candidates(weight, 255)

    got = observer_of(weight).quantize(weight)

    wanted = best_of(tried, weight_errors(weight, tried))
    assert torch.equal(got.values, wanted.values)
    scale, zero_point = observer_of(weight).calculate_qparams()
    assert torch.equal(scale, wanted.scale)
    assert not torch.equal(scale, tried[0].scale)
    assert zero_point.tolist() == [0] * 32


def test_a_weight_must_have_been_observed() -> None:
    with pytest.raises(RuntimeError, match="run the prepared model first"):
        PairSafePerChannelObserver().calculate_qparams()


def test_a_weight_that_changes_after_calibration_is_safe_all_the_same() -> None:
    weight = torch.randn(16, 32)
    observer = observer_of(weight)
    observer.observe_layer(aten.linear.default, (skewed(20, 32), weight), {})

    other = weight.abs() * 5
    got = observer.quantize(other)

    assert (PAIRS_WITHOUT_VNNI.largest_sums(got.values) <= 128).all()
    assert sqnr_db(got.dequantize(), other) > 30


class Both(nn.Module):
    """One linear, called twice, and an embedding whose weight is also that of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(16, 16)
        self.embedding = nn.Embedding(12, 16)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.again = nn.Linear(16, 12, bias=False)
        self.again.weight = self.head.weight

    def forward(self, x: Tensor) -> Any:
        y = self.twice(torch.relu(self.twice(x)))
        return self.head(y), self.again(x), self.embedding(torch.tensor([1, 2]))


def test_modules_called_twice_and_tied_weights() -> None:
    x = skewed(30, 16)

    reference = quantize(Both().eval(), x, SAFE, [x])

    # Two uses of one weight may be two observers, which see different activations.
    weights = int8_weights(reference)
    assert {name.removesuffix("_1") for name in weights} <= {
        *("twice.weight", "head.weight", "again.weight", "embedding.weight")
    }
    assert_cannot_saturate(reference, len(weights))
    lowered: tuple[LoweredOp, ...] = lower(reference, SAFE).meta["versatil_lowering"].lowered
    assert [op.op for op in lowered].count("linear") == 4
    assert [op.op for op in lowered].count("embedding") == 1
    assert not any(op.may_saturate for op in lowered)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, 8, 3)
        self.blocks = nn.ModuleList([nn.Conv2d(8, 8, 3, groups=groups) for groups in (2, 8)])
        self.functional = nn.Parameter(torch.randn(5, 8, 1, 1).abs())

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).unflatten(2, (6, -1))
        for block in self.blocks:
            y = torch.relu(block(y))
        return functional.conv2d(y, self.functional, bias=torch.ones(5))


def test_buffers_are_named_after_their_weights() -> None:
    x = torch.randn(3, 4, 38)

    reference = quantize(Convolutions().eval(), x, SAFE, [x])

    names = {"stem.weight", "blocks.0.weight", "blocks.1.weight", "functional"}
    assert int8_weights(reference).keys() == names
    buffers = dict(reference.named_buffers())
    for name in names:
        assert buffers[f"{name}_scale"].dtype is torch.float32
        assert buffers[f"{name}_zero_point"].tolist() == [0] * len(buffers[f"{name}_scale"])
    assert_cannot_saturate(reference, 4)


def test_a_name_that_is_taken_is_not_overwritten() -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer(
                "layer_weight_int8", torch.ones(4)
            )  # the observer's own name for it
            self.layer.register_buffer("weight_scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer_weight_int8 + self.layer.weight_scale

    x = torch.randn(8, 4)
    model = Taken().eval()

    reference = quantize(model, x, SAFE, [x])

    assert int8_weights(reference).keys() == {"layer.weight"}
    assert "layer.weight_scale_1" in reference.state_dict()
    assert sqnr_db(reference(x), model(x)) > 25


def small() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    with torch.no_grad():  # what saturates
        for parameter in model.parameters():
            parameter.abs_()
    return model.eval()


def test_in_torchao_s_own_flow() -> None:
    """``prepare_pt2e``, a run, ``convert_pt2e``: nobody shows the observer what layers compute."""
    model, x = small(), torch.rand(6, 3, 6, 6)
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), SAFE.create_quantizer())
    prepared(x)

    reference = convert_pt2e(prepared)

    assert_cannot_saturate(reference, 2)
    assert sqnr_db(reference(x), model(x)) > 25
    weight = model.get_parameter("0.weight").detach()
    wanted = observer_of(weight).quantize(weight)
    [got] = [value for name, value in int8_weights(reference).items() if value.dim() == 4]
    assert torch.equal(got, wanted.values)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's, of the copy
def test_a_copy_of_a_prepared_model_converts_to_the_same() -> None:
    model, x = small(), torch.rand(6, 3, 6, 6)
    prepared = prepare(export(model, x), SAFE)
    calibrate(prepared, [x], x)

    copied = copy.deepcopy(prepared)
    first, second = convert(copied), convert(prepared)

    assert torch.equal(first(x), second(x))
    assert first.state_dict().keys() == second.state_dict().keys()
    assert_cannot_saturate(first, 2)
    assert_cannot_saturate(convert(prepared), 2)  # and once more: converting changes nothing


def test_calibration_is_what_the_search_sees() -> None:
    """The weights differ from those without data, and the model's output is nearer to float."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    x = skewed(128, 64)
    prepared = prepare(export(model, x), SAFE)
    calibrate(prepared, [x], x, observe_layers=False)
    unseen = convert(prepared)

    seen = quantize(model, x, SAFE, [x])

    assert not torch.equal(seen(x), unseen(x))
    assert sqnr_db(seen(x), model(x)) > sqnr_db(unseen(x), model(x))


def test_bfloat16_weights() -> None:
    """No kernel runs such a layer, but the bound holds, and the reference computes in bfloat16."""
    model = small().to(torch.bfloat16)
    x = torch.rand(6, 3, 6, 6, dtype=torch.bfloat16)

    reference = quantize(model, x, SAFE, [x])

    assert_cannot_saturate(reference, 2)
    assert reference(x).dtype is torch.bfloat16
    assert sqnr_db(reference(x).float(), model(x).float()) > 20


def test_only_the_activation_s_range_matters() -> None:
    """7-bit activations need no bound on weights of 8."""
    weight = torch.rand(4, 8) + 1

    wide = PairSafePerChannelObserver(activation_max=127).quantize(weight)

    assert wide.values.max() == 127
    assert PAIRS_WITHOUT_VNNI.limit(127) == 258
