"""The bound on pairs of int8 weights: it holds for every weight, at every scale, and costs no more than it must."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from versatil_x86.int8_weight import along_channels
from versatil_x86.pair_safe_weights import (
    PAIRS_WITHOUT_VNNI,
    SCALE_SHARES,
    best_of,
    candidates,
    plain_scale,
    round_within_pairs,
    weight_errors,
)

PROPERTY = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda w: w,
    "heavy_tailed": lambda w: (
        w / torch.randn_like(w).abs().clamp(min=0.01)
    ),  # Student's t, 1 degree
    "all_positive": lambda w: w.abs() + 0.1,
    "all_negative": lambda w: -w.abs() - 0.1,
    "all_127": lambda w: torch.full_like(w, 127.0),
    "zeros": torch.zeros_like,
    "some_channels_of_zeros": lambda w: (
        w * (torch.arange(len(w)) % 2).view(-1, *[1] * (w.dim() - 1))
    ),
    "tiny": lambda w: w * 1e-30,
    "huge": lambda w: w.clamp(-3, 3) * 1e38,
    "bfloat16": lambda w: w.to(torch.bfloat16),
    "float16": lambda w: w.abs().to(torch.float16),
}
# A linear is cut in two from 257 features on; 257, 258, 261, 514 have an odd first half, 260 an even one.
SHAPES = [
    *[(3, 1), (3, 2), (4, 7), (2, 16), (3, 257), (3, 258), (2, 260), (3, 261), (2, 514)],
    *[(4, 3, 3), (4, 6, 1), (5, 1, 3), (3, 300, 1)],
    *[(4, 5, 3, 3), (6, 2, 1, 2), (8, 1, 3, 3), (2, 257, 1, 1)],
]
# All 8 bits; 7 bits; and limits that are odd (163) or even (218) in between.
ACTIVATION_MAXIMA = [255, 127, 200, 150]


def make_weight(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    torch.manual_seed(seed)
    return KINDS[kind](torch.randn(shape))


weights = st.builds(
    make_weight, st.sampled_from(sorted(KINDS)), st.sampled_from(SHAPES), st.integers(0, 999)
)


def pairs_of(shape: torch.Size) -> set[tuple[int, int]]:
    """Which input features a kernel may add up, spelled out: blocks, and neighbours within each."""
    features = shape[1]
    pairs = {(first, first + 1) for first in range(0, features - 1, 2)}
    if len(shape) == 2 and features > 256:
        middle = (features + 1) // 2
        pairs |= {(first, first + 1) for first in range(0, middle - 1, 2)}
        pairs |= {(first, first + 1) for first in range(middle, features - 1, 2)}
    return pairs


def worst_sums(values: Tensor, activation_max: int) -> tuple[int, int]:
    """The largest and the smallest sum of two products that any input reaches."""
    weight = values.long().flatten(2) if values.dim() > 2 else values.long().unsqueeze(2)
    largest = smallest = 0
    for first, second in pairs_of(values.shape):
        both = torch.stack([weight[:, first], weight[:, second]])
        largest = max(largest, int(both.clamp(min=0).sum(0).max()) * activation_max)
        smallest = min(smallest, int(both.clamp(max=0).sum(0).min()) * activation_max)
    return largest, smallest


def assert_cannot_saturate(values: Tensor, activation_max: int) -> None:
    assert values.dtype is torch.int8
    assert values.abs().max() <= 127
    largest, smallest = worst_sums(values, activation_max)
    assert largest <= 2**15 - 1
    assert smallest >= -(2**15)


@PROPERTY
@given(
    weight=weights,
    activation_max=st.sampled_from(ACTIVATION_MAXIMA),
    share=st.floats(0.01, 1.2),
    are_shares_random=st.booleans(),
)
def test_the_bound_holds_at_every_scale(
    weight: Tensor, activation_max: int, share: float, *, are_shares_random: bool
) -> None:
    scale = plain_scale(weight, activation_max) * share
    if are_shares_random:
        scale = scale * torch.rand(len(weight)).clamp(min=0.01)

    quantized = round_within_pairs(weight, scale, activation_max)

    assert torch.equal(quantized.scale, scale)
    assert quantized.values.shape == weight.shape
    assert_cannot_saturate(quantized.values, activation_max)
    # What a CPU would be warned about is the same bound.
    largest = PAIRS_WITHOUT_VNNI.largest_sums(quantized.values)
    assert (largest <= PAIRS_WITHOUT_VNNI.limit(activation_max)).all()


@PROPERTY
@given(weight=weights, activation_max=st.sampled_from(ACTIVATION_MAXIMA))
def test_the_plain_scale_clips_nothing(weight: Tensor, activation_max: int) -> None:
    scale = plain_scale(weight, activation_max)

    quantized = round_within_pairs(weight, scale, activation_max)

    assert scale.dtype is torch.float32
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    scaled = weight.float() / along_channels(scale, weight)
    assert torch.equal(quantized.values, scaled.round().to(torch.int8))
    assert_cannot_saturate(quantized.values, activation_max)
    # Nor is it larger than it has to be: it uses the whole of int8, or the whole of a pair.
    is_used = (weight.float().abs().flatten(1).amax(1) > 1e-3).nonzero().flatten()
    largest = PAIRS_WITHOUT_VNNI.largest_sums(quantized.values)
    whole_pair = largest >= PAIRS_WITHOUT_VNNI.limit(activation_max) - 1
    whole_int8 = quantized.values.abs().flatten(1).amax(1) == 127
    assert (whole_pair | whole_int8)[is_used].all()


@PROPERTY
@given(weight=weights, activation_max=st.sampled_from(ACTIVATION_MAXIMA))
def test_the_best_candidate_is_never_worse_than_the_plain_one(
    weight: Tensor, activation_max: int
) -> None:
    tried = candidates(weight, activation_max)
    errors = weight_errors(weight, tried)

    best = best_of(tried, errors)

    assert torch.equal(tried[0].scale, plain_scale(weight, activation_max))
    assert len(tried) == len(SCALE_SHARES)
    assert (weight_errors(weight, [best])[0] <= errors[0]).all()
    assert torch.equal(weight_errors(weight, [best])[0], errors.amin(0))
    assert_cannot_saturate(best.values, activation_max)


def test_a_smaller_scale_than_the_plain_one_is_often_better() -> None:
    weight = make_weight("normal", (64, 256), 0)

    errors = weight_errors(weight, candidates(weight, 255))

    assert (errors.amin(0) < errors[0]).float().mean() > 0.25
    assert errors.amin(0).sum() < 0.99 * errors[0].sum()


def test_best_of_takes_each_channel_from_its_best_candidate_and_the_first_of_equals() -> None:
    weight = make_weight("normal", (3, 8), 0)
    tried = candidates(weight, 255)[:3]

    best = best_of(tried, torch.tensor([[1.0, 2.0, 5.0], [1.0, 3.0, 4.0], [0.5, 2.0, 9.0]]))

    for channel, choice in enumerate([2, 0, 1]):
        assert torch.equal(best.values[channel], tried[choice].values[channel])
        assert best.scale[channel] == tried[choice].scale[channel]


@PROPERTY
@given(
    pair=st.tuples(st.floats(-127, 127, width=32), st.floats(-127, 127, width=32)),
    activation_max=st.sampled_from(ACTIVATION_MAXIMA),
)
def test_clipping_takes_the_nearest_pair_that_is_safe(
    pair: tuple[float, float], activation_max: int
) -> None:
    """All 255 * 255 pairs of integers are tried."""
    weight = torch.tensor([pair])

    got = round_within_pairs(weight, torch.ones(1), activation_max).values[0].double()

    grid = torch.arange(-127, 128, dtype=torch.float64)
    first, second = torch.meshgrid(grid, grid, indexing="ij")
    limit = 32767 // activation_max
    is_safe = (first.clamp(min=0) + second.clamp(min=0) <= limit) & (
        first.clamp(max=0) + second.clamp(max=0) >= -limit
    )
    errors = (first - pair[0]) ** 2 + (second - pair[1]) ** 2
    error = (got[0] - pair[0]) ** 2 + (got[1] - pair[1]) ** 2
    assert error <= errors[is_safe].min() + 1e-4  # float32 knows a weight near 127 to 1e-5


@PROPERTY
@given(weight=weights, share=st.floats(0.1, 1))
def test_clipping_makes_no_magnitude_larger_and_touches_no_other_pair(
    weight: Tensor, share: float
) -> None:
    scale = plain_scale(weight, 255) * share
    scaled = (weight.float() / along_channels(scale, weight)).clamp(-127, 127).round()

    values = round_within_pairs(weight, scale, 255).values.float()

    assert (values.abs() <= scaled.abs()).all()
    assert (values * scaled >= 0).all()
    changed = (values != scaled).nonzero()[:, :2].unique(dim=0).tolist()
    for channel, feature in changed[:20]:
        neighbours = scaled[channel, max(feature - 1, 0) : feature + 2].abs()
        assert (neighbours[1:] + neighbours[:-1]).max() > 128


@pytest.mark.parametrize("activation_max", ACTIVATION_MAXIMA)
@pytest.mark.parametrize("shape", [(8, 1, 3, 3), (8, 1, 5), (4, 1)])
def test_a_depthwise_convolution_is_not_constrained(
    shape: tuple[int, ...], activation_max: int
) -> None:
    weight = make_weight("all_positive", shape, 0)

    scale = plain_scale(weight, activation_max)

    largest = weight.abs().flatten(1).amax(1)
    torch.testing.assert_close(scale, largest / 127, rtol=2e-5, atol=0)
    tried = round_within_pairs(weight, scale, activation_max)
    assert (tried.values.flatten(1).amax(1) == 127).all()


def test_seven_bits_of_activation_do_not_constrain_weights() -> None:
    weight = make_weight("all_127", (4, 6), 0)

    assert (round_within_pairs(weight, plain_scale(weight, 127), 127).values == 127).all()
    assert (round_within_pairs(weight, plain_scale(weight, 255), 255).values == 64).all()


def test_a_lone_last_feature_keeps_all_of_int8() -> None:
    weight = torch.tensor([[0.1, 0.1, 1.0]])  # the last of three has no partner

    values = round_within_pairs(weight, plain_scale(weight, 255), 255).values

    assert values.tolist() == [[13, 13, 127]]


def test_groups_are_pairs_within_the_group() -> None:
    """A weight of a grouped convolution has the group's channels only: the last of three is alone."""
    weight = torch.tensor([0.1, 0.1, 1.0]).view(1, 3, 1, 1).repeat(4, 1, 1, 1)

    values = round_within_pairs(weight, plain_scale(weight, 255), 255).values

    assert values.flatten(1).tolist() == [[13, 13, 127]] * 4


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 4, 3, 3)])
def test_weights_without_elements(shape: tuple[int, ...]) -> None:
    weight = torch.zeros(shape)

    tried = candidates(weight, 255)

    best = best_of(tried, weight_errors(weight, tried))
    assert best.values.shape == weight.shape
    assert best.scale.shape == shape[:1]
