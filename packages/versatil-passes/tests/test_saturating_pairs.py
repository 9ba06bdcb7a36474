"""Which weights are a pair, and which sums of them are safe."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from versatil_passes import SaturatingPairs

PAIRS = SaturatingPairs(accumulator_max=32767, uncut_features=256)


def int8(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


def at(shape: tuple[int, ...], values: dict[tuple[int, ...], int]) -> Tensor:
    """Zeros but for the values at these places."""
    weight = torch.zeros(shape, dtype=torch.int8)
    for place, value in values.items():
        weight[place] = value
    return weight


def sums(weight: Tensor) -> list[int]:
    result = PAIRS.largest_sums(weight)
    assert result.shape == weight.shape[:1]
    return [int(value) for value in result]


@pytest.mark.parametrize(("activation_max", "limit"), [(255, 128), (128, 255), (127, 258)])
def test_the_limit(activation_max: int, limit: int) -> None:
    assert PAIRS.limit(activation_max) == limit
    assert activation_max * limit <= 32767 < activation_max * (limit + 1)


def test_a_smaller_accumulator_has_a_smaller_limit() -> None:
    assert SaturatingPairs(accumulator_max=16383, uncut_features=256).limit(255) == 64


@pytest.mark.parametrize(
    ("row", "largest"),
    [
        ([100, 50, 3, 4], 150),
        ([3, 4, -100, -50], 150),
        ([10, 100, 50, 10], 110),  # 100 and 50 are neighbours but no pair
        ([100, -90, 60, -80], 100),  # opposite signs do not add: the largest alone counts
        ([1, -128, 2, 3], 128),
        ([-128, -128, 127, 127], 256),
        ([5], 5),
        ([-128], 128),
        ([10, 20, 100], 100),  # an odd one is alone
        ([60, 70, 100], 130),
        ([0, 0], 0),
    ],
)
def test_a_linear(row: list[int], largest: int) -> None:
    assert sums(int8([row])) == [largest]


def test_each_output_channel_for_itself() -> None:
    weight = int8([[1, 2, 3, 4], [-9, -8, 0, 0], [0, 0, 0, 0]])

    assert sums(weight) == [7, 17, 0]
    assert PAIRS.largest_sums(weight).dtype is torch.int32


def test_float_weights_are_not_rounded() -> None:
    """They are asked about before they have a scale."""
    result = PAIRS.largest_sums(torch.tensor([[0.25, 0.5, -1.0, 0.5]]))

    assert result.dtype is torch.float32
    assert result.tolist() == [1.0]


@pytest.mark.parametrize("kernel", [(3,), (3, 3)])
def test_a_convolution_pairs_channels_at_one_kernel_position(kernel: tuple[int, ...]) -> None:
    here, there = (0,) * len(kernel), (2,) * len(kernel)

    assert sums(at((1, 4, *kernel), {(0, 0, *there): 90, (0, 1, *there): 80})) == [170]
    assert sums(at((1, 4, *kernel), {(0, 0, *here): 90, (0, 1, *there): 80})) == [90]
    assert sums(at((1, 4, *kernel), {(0, 0, *here): 90, (0, 0, *there): 80})) == [90]
    assert sums(at((1, 4, *kernel), {(0, 1, *here): 90, (0, 2, *here): 80})) == [90]
    assert sums(at((1, 3, *kernel), {(0, 2, *here): -128, (0, 1, *here): -9})) == [128]


def test_channels_of_a_group_are_paired() -> None:
    """Four channels in two groups: dimension 1 counts those of one group."""
    weight = at((4, 2, 3, 3), {(1, 0, 1, 1): 70, (1, 1, 1, 1): 71, (3, 1, 0, 0): 72})

    assert sums(weight) == [0, 141, 0, 72]


def test_depthwise_has_no_pairs() -> None:
    assert sums(torch.full((2, 1, 3, 3), -128, dtype=torch.int8)) == [128, 128]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (0, 2, 3), (2, 2, 0), (2, 0, 3, 3)])
def test_empty_weights(shape: tuple[int, ...]) -> None:
    assert sums(torch.empty(shape, dtype=torch.int8)) == [0] * shape[0]


@pytest.mark.parametrize(
    ("features", "starts"),
    [
        (255, (0,)),
        (256, (0,)),
        (257, (0, 1)),  # blocks of 129 and 128
        (258, (0, 1)),
        (259, (0,)),  # 130 and 129
        (260, (0,)),
        (511, (0,)),
        (513, (0, 1)),
        (768, (0,)),
        (770, (0, 1)),
    ],
)
def test_a_long_linear_may_pair_the_other_way_too(features: int, starts: tuple[int, ...]) -> None:
    weight = at((1, features), {(0, 1): 100, (0, 2): 90, (0, 0): 5})

    assert PAIRS.first_features(weight) == starts
    assert sums(weight) == [190 if starts == (0, 1) else 105]


def test_both_ways_count_where_both_may_occur() -> None:
    assert sums(at((1, 258), {(0, 0): 100, (0, 1): 90})) == [190]
    # Shifted by one, the first feature and the last are alone.
    assert sums(at((1, 258), {(0, 257): 100, (0, 0): 90})) == [100]


def test_a_convolution_is_never_cut() -> None:
    weight = at((1, 258, 1, 1), {(0, 1, 0, 0): 100, (0, 2, 0, 0): 90})

    assert PAIRS.first_features(weight) == (0,)
    assert sums(weight) == [100]


def test_the_length_of_an_uncut_linear_is_the_cpus() -> None:
    long = SaturatingPairs(accumulator_max=32767, uncut_features=384)

    assert long.first_features(at((1, 258), {})) == (0,)
    assert long.first_features(at((1, 386), {})) == (0, 1)


def by_definition(weight: Tensor, uncut_features: int) -> list[int]:
    """The same, one weight after the other."""
    features = weight.shape[1]
    starts = [0]
    if weight.dim() == 2 and features > uncut_features and -(-features // 2) % 2:
        starts.append(1)
    result = []
    for channel in weight.flatten(2).tolist() if weight.dim() > 2 else weight[..., None].tolist():
        largest = 0
        for position in range(len(channel[0]) if channel else 0):
            row = [feature[position] for feature in channel]
            largest = max([largest, *map(abs, row)])
            for start in starts:
                for i in range(start, features - 1, 2):
                    if row[i] * row[i + 1] > 0:
                        largest = max(largest, abs(row[i] + row[i + 1]))
        result.append(largest)
    return result


@settings(deadline=None, max_examples=200)
@given(
    out=st.integers(0, 3),
    features=st.integers(0, 14),
    kernel=st.sampled_from([(), (1,), (3,), (2, 2)]),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_definition(out: int, features: int, kernel: tuple[int, ...], seed: int) -> None:
    """With a length from which a linear is cut that small weights exceed as well."""
    pairs = SaturatingPairs(accumulator_max=32767, uncut_features=5)
    generator = torch.Generator().manual_seed(seed)
    shape = (out, features, *kernel)
    weight = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    assert pairs.largest_sums(weight).tolist() == by_definition(weight, 5)
    assert pairs.largest_sums(weight.float()).tolist() == by_definition(weight, 5)
