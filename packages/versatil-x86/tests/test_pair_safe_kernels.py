"""oneDNN's own kernels: exact with pair-safe weights, and saturating without them where there is no VNNI.

Everything runs twice: on this CPU as it is, and in a process in which oneDNN may use nothing beyond AVX2 (this very
file, run as a script), so that a CPU with VNNI behaves like one without and the tests mean the same everywhere.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from versatil_core import sqnr_db
from versatil_x86 import CPUFeatures
from versatil_x86.pair_safe_weights import PAIRS_WITHOUT_VNNI, plain_scale, round_within_pairs

HOST = CPUFeatures.detect()
BRANCHES = {
    "this CPU": f"on this CPU ({HOST}), {'with' if HOST.has_vnni else 'without'} VNNI",
    "AVX2": "with ONEDNN_MAX_CPU_ISA=AVX2, so without VNNI",
}
pytestmark = pytest.mark.skipif(not HOST.avx2, reason="not an x86 CPU with AVX2")

onednn = torch.ops.onednn
X_SCALE, X_ZERO_POINT = 0.03, 7
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda w: w,
    "heavy_tailed": lambda w: w / torch.randn_like(w).abs().clamp(min=0.05),
    "all_positive": lambda w: w.abs() + 0.5,
    "all_127": lambda w: torch.full_like(w, 127.0),
    "zero_channels": lambda w: w.abs() * (torch.arange(len(w)) % 2).view(-1, *[1] * (w.dim() - 1)),
}
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "all_255": lambda *shape: torch.full(shape, 255, dtype=torch.uint8),
    "0_or_255": lambda *shape: (torch.randint(0, 2, shape) * 255).to(torch.uint8),
    "random": lambda *shape: torch.randint(0, 256, shape).to(torch.uint8),
}
# (rows, in_features, out_features). From 257 to 767 features the product is cut in two; with 257, 258, 261, 513, 514
# and 517 the first half is odd. 385 and 1026 are what AVX-512 cuts so.
LINEARS = [
    *[(1, 1, 3), (2, 2, 5), (3, 7, 16), (4, 64, 8), (33, 255, 4), (2, 256, 17)],
    *[(5, width, 12) for width in (257, 258, 261, 513, 514, 517)],
    *[(1, 258, 16), (33, 517, 8), (3, 385, 8), (3, 766, 8), (3, 770, 8), (2, 1026, 8)],
]
# (in_channels, out_channels, kernel, groups): plain, grouped, depthwise; one and two dimensions.
CONVOLUTIONS = [
    *[(3, 8, (3,), 1), (8, 6, (2,), 2), (5, 5, (3,), 5)],
    *[(3, 16, (7, 7), 1), (5, 3, (3, 3), 1), (16, 8, (1, 1), 1), (257, 4, (1, 1), 1)],
    *[(6, 4, (3, 3), 2), (12, 12, (3, 2), 4), (8, 8, (3, 3), 8), (4, 8, (3, 3), 4)],
]


def linear(x: Tensor, weight: Tensor, scale: Tensor, zero_point: int = X_ZERO_POINT) -> Tensor:
    noughts = torch.zeros(len(weight), dtype=torch.int64)
    result: Tensor = onednn.qlinear_pointwise(
        x, X_SCALE, zero_point, onednn.qlinear_prepack(weight, None), scale, noughts,
        None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return result


def convolution(
    x: Tensor, weight: Tensor, scale: Tensor, groups: int, zero_point: int = X_ZERO_POINT
) -> Tensor:
    dims = weight.dim() - 2
    ones, noughts = [1] * dims, [0] * dims
    packed = onednn.qconv_prepack(
        weight, scale, X_SCALE, zero_point, ones, noughts, ones, groups, None
    )
    result: Tensor = onednn.qconv_pointwise(
        x, X_SCALE, zero_point, packed, scale, torch.zeros(len(weight), dtype=torch.int64), None,
        ones, noughts, ones, groups, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return result


def exact_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return X_SCALE * (x.double() - X_ZERO_POINT) @ weight.double().T * scale.double()


def exact_convolution(x: Tensor, weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    convolve: Any = functional.conv1d if weight.dim() == 3 else functional.conv2d
    sums = convolve(x.double() - X_ZERO_POINT, weight.double(), groups=groups)
    return X_SCALE * sums * scale.double().view(-1, *[1] * (weight.dim() - 2))


def layers() -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Any, Any]]:
    """Name -> kernel, exact arithmetic, shape of the weight, shape of the activation."""
    found: dict[str, Any] = {}
    for rows, features, outputs in LINEARS:
        name = f"linear {rows}x{features}x{outputs}"
        found[name] = (linear, exact_linear, (outputs, features), (rows, features))
    for channels, outputs, kernel, groups in CONVOLUTIONS:
        shape = "x".join(map(str, (channels, outputs, *kernel)))
        found[f"conv{len(kernel)}d {shape} in {groups} groups"] = (
            partial(convolution, groups=groups),
            partial(exact_convolution, groups=groups),
            (outputs, channels // groups, *kernel),
            (2, channels, *[9, 8][: len(kernel)]),
        )
    return found


def worst_db(layer: str) -> dict[str, float]:
    """SQNR of the kernel against exact arithmetic, for every kind of weight: the worst over scales and activations."""
    kernel, exact, weight_shape, x_shape = layers()[layer]
    torch.manual_seed(0)
    worst = {}
    for kind, make in WEIGHTS.items():
        found = []
        weight = make(torch.randn(weight_shape))
        scale = plain_scale(weight, 255)
        for share in (1.0, 0.7):  # at the latter, many pairs have been clipped
            quantized = round_within_pairs(weight, scale * share, 255)
            for activations in ACTIVATIONS.values():
                args = activations(*x_shape), quantized.values, quantized.scale
                found.append(sqnr_db(kernel(*args), exact(*args)))
        worst[kind] = min(found)
    return worst


def saturated_db() -> dict[str, float]:
    """The same for all-positive weights at the usual scale, max / 127: the bound doesn't hold."""
    torch.manual_seed(0)
    found = {}
    for name in ("linear 4x64x8", "conv2d 16x8x1x1 in 1 groups", "conv1d 3x8x3 in 1 groups"):
        kernel, exact, weight_shape, x_shape = layers()[name]
        weight = torch.rand(weight_shape) + 1.0
        scale = weight.flatten(1).amax(1) / 127
        values = (weight / scale.view(-1, *[1] * (weight.dim() - 1))).round().to(torch.int8)
        args = ACTIVATIONS["all_255"](*x_shape), values, scale
        found[name] = sqnr_db(kernel(*args), exact(*args))
    return found


def linear_pairs(features: int) -> list[int]:
    """The features that are added to their right neighbour in 16 bits: each output has 127 for one such pair."""
    first = torch.arange(features - 1)
    weight = torch.zeros(features - 1, features, dtype=torch.int8)
    weight[first, first] = weight[first, first + 1] = 127
    x = torch.full((3, features), 255, dtype=torch.uint8)
    sums = linear(x, weight, torch.ones(len(weight)), 0)[0] / X_SCALE
    return (sums < 2 * 127 * 255 - 10).nonzero().flatten().tolist()


def convolution_pairs(dims: int, channels: int, groups: int) -> list[list[Any]]:
    """The same for all pairs of (channel of the group, position in a kernel of two), for each group."""
    taps = [*itertools.product(range(channels // groups), range(2))]
    pairs = [*itertools.combinations(taps, 2)]
    weight = torch.zeros(groups * len(pairs), channels // groups, 2, *[1] * (dims - 1))
    for output in range(len(weight)):
        for channel, position in pairs[output % len(pairs)]:
            weight[output, channel, position] = 127
    x = torch.full((1, channels, *[5] * dims), 255, dtype=torch.uint8)
    result = convolution(x, weight.to(torch.int8), torch.ones(len(weight)), groups, 0)
    sums = result.flatten(2).amax(2)[0] / X_SCALE
    is_pair = (sums < 2 * 127 * 255 - 10).view(groups, -1).tolist()
    return [[list(map(list, pair)) for pair in itertools.compress(pairs, row)] for row in is_pair]


FEATURES = [6, 7, 256, 257, 258, 261, 514, 517, 766, 770, 1030]
CHANNELS = [(1, 5, 1), (2, 5, 1), (2, 8, 2), (2, 4, 4), (1, 4, 4)]


def measure() -> dict[str, Any]:
    return {
        "worst": {name: worst_db(name) for name in layers()},
        "saturated": saturated_db(),
        "linear_pairs": [linear_pairs(features) for features in FEATURES],
        "convolution_pairs": [convolution_pairs(*shape) for shape in CHANNELS],
    }


@cache
def measured(branch: str) -> Any:
    if branch == "this CPU":
        return measure()
    result = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("branch", BRANCHES, ids=BRANCHES.values())
@pytest.mark.parametrize("layer", layers())
def test_kernels_are_exact_with_pair_safe_weights(layer: str, branch: str) -> None:
    for kind, worst in measured(branch)["worst"][layer].items():
        assert worst >= 100, f"{layer}, {kind} weights, {BRANCHES[branch]}: {worst:.1f} dB"


def test_kernels_saturate_without_the_bound() -> None:
    """If this fails, oneDNN does without 16-bit sums by now, and weights need not be pair-safe any more."""
    for layer, found in measured("AVX2")["saturated"].items():
        assert found < 30, f"{layer}, {BRANCHES['AVX2']}: exact to {found:.1f} dB"


def test_vnni_is_what_decides() -> None:
    """That ``CPUFeatures.has_vnni`` says what oneDNN does."""
    for layer, found in measured("this CPU")["saturated"].items():
        message = f"{layer}, {BRANCHES['this CPU']}: {found:.1f} dB"
        assert (found >= 100) is HOST.has_vnni, message


@pytest.mark.parametrize(("position", "features"), [*enumerate(FEATURES)])
def test_which_features_of_a_linear_are_a_pair(position: int, features: int) -> None:
    """If this fails, oneDNN pairs or cuts otherwise: look at ``SaturatingPairs`` before anything else."""
    whole = [*range(0, features - 1, 2)]
    middle = (features + 1) // 2
    halves = [*range(0, middle - 1, 2), *range(middle, features - 1, 2)]

    found = measured("AVX2")["linear_pairs"][position]

    assert found == (halves if 256 < features < 768 else whole), BRANCHES["AVX2"]
    # What the bound covers.
    starts = PAIRS_WITHOUT_VNNI.first_features(torch.empty(1, features))
    covered = {first for start in starts for first in range(start, features - 1, 2)}
    assert covered.issuperset(found)


@pytest.mark.parametrize(("position", "shape"), [*enumerate(CHANNELS)])
def test_which_channels_of_a_convolution_are_a_pair(
    position: int, shape: tuple[int, int, int]
) -> None:
    """Neighbours of one group at the same position of the kernel; none of a depthwise convolution."""
    _, channels, groups = shape
    wanted = [
        [[first, tap], [first + 1, tap]]
        for first in range(0, channels // groups - 1, 2)
        for tap in range(2)
    ]

    found = measured("AVX2")["convolution_pairs"][position]

    assert found == [wanted] * groups, BRANCHES["AVX2"]


def test_the_bound_is_tight() -> None:
    """At 128 a pair is exact, at 129 it isn't: the limit takes nothing that it need not take."""
    weight = torch.tensor([[64, 64], [127, 1]], dtype=torch.int8)

    assert PAIRS_WITHOUT_VNNI.largest_sums(weight).tolist() == [128, 128]
    assert 255 * 128 <= 2**15 - 1 < 255 * 129
    assert plain_scale(torch.tensor([[1.0, 1.0]]), 255) == pytest.approx(1 / 64, rel=1e-4)


if __name__ == "__main__":
    print(json.dumps(measure()))  # noqa: T201 -- read by measured()
