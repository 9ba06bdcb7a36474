"""The rules say what oneDNN's kernels accept: each claim is run here."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from versatil_x86 import CPUFeatures
from versatil_x86.pair_safe_weights import PAIRS_WITHOUT_VNNI
from versatil_x86.rules import x86_lowering_rules

RULES = x86_lowering_rules(CPUFeatures())
onednn = torch.ops.onednn
# name -> (the kernel's name, arguments, algorithm, what it should compute)
POST_OPS: dict[str, tuple[str, list[float], str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "relu": ("relu", [], "", torch.relu),
    "hardtanh": ("hardtanh", [-0.5, 3.0], "", lambda t: t.clamp(-0.5, 3.0)),
    "hardswish": ("hardswish", [], "", functional.hardswish),
    "silu": ("swish", [], "", functional.silu),
    "gelu": ("gelu", [], "none", functional.gelu),
}


def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def test_saturation_depends_on_vnni() -> None:
    for features in (CPUFeatures(), CPUFeatures(avx2=True), CPUFeatures(avx2=True, avx512=True)):
        assert x86_lowering_rules(features).saturating_pairs == PAIRS_WITHOUT_VNNI
    for features in (CPUFeatures(avx_vnni=True), CPUFeatures(avx512_vnni=True)):
        assert x86_lowering_rules(features).saturating_pairs is None


@pytest.mark.parametrize("activation_max", [255, 200, 127])
def test_the_limit_is_the_largest_that_cannot_saturate(activation_max: int) -> None:
    assert RULES.saturating_pairs is not None
    limit = RULES.saturating_pairs.limit(activation_max)
    assert limit * activation_max <= 2**15 - 1 < (limit + 1) * activation_max


def test_7_bits_of_activation_cannot_saturate() -> None:
    """What ``reduce_range`` relies on: not even two weights of -128 exceed the limit."""
    assert RULES.saturating_pairs is not None
    assert RULES.saturating_pairs.limit(127) >= 2 * 128


def test_what_to_do_is_said() -> None:
    assert "no VNNI" in PAIRS_WITHOUT_VNNI.cause
    assert "make_saturation_safe(reference)" in PAIRS_WITHOUT_VNNI.remedy


def test_machines() -> None:
    assert RULES.machine_types == ("x86_64", "amd64")


@pytest.mark.parametrize("post_op", sorted(POST_OPS))
def test_linear_post_ops(post_op: str) -> None:
    assert RULES.admits_post_op("linear", post_op, has_residual=False)
    name, arguments, algorithm, function = POST_OPS[post_op]
    x = integers(0, 128, 4, 16, dtype=torch.uint8)
    weight = integers(-127, 128, 8, 16, dtype=torch.int8)
    scales, zero_points = torch.linspace(0.001, 0.01, 8), torch.zeros(8, dtype=torch.int64)

    got = onednn.qlinear_pointwise(
        x, 0.02, 3, onednn.qlinear_prepack(weight, None), scales, zero_points,
        None, 1.0, 0, torch.float32, name, arguments, algorithm,
    )  # fmt: skip

    want = function(0.02 * (x.float() - 3) @ (weight.float() * scales[:, None]).T)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("post_op", sorted(POST_OPS))
def test_conv_post_ops(post_op: str, dims: int) -> None:
    name, arguments, algorithm, function = POST_OPS[post_op]
    x = integers(0, 128, 2, 4, *[6] * dims, dtype=torch.uint8)
    weight = integers(-127, 128, 8, 4, *[3] * dims, dtype=torch.int8)
    scales, zero_points = torch.linspace(0.001, 0.01, 8), torch.zeros(8, dtype=torch.int64)
    ones, noughts = [1] * dims, [0] * dims
    packed = onednn.qconv_prepack(weight, scales, 0.02, 3, ones, noughts, ones, 1, None)

    def run() -> torch.Tensor:
        result: torch.Tensor = onednn.qconv_pointwise(
            x, 0.02, 3, packed, scales, zero_points, None, ones, noughts, ones, 1,
            1.0, 0, torch.float32, name, arguments, algorithm,
        )  # fmt: skip
        return result

    if not RULES.admits_post_op(f"conv{dims}d", post_op, has_residual=False):
        with pytest.raises(RuntimeError):
            run()
        return
    convolve = functional.conv1d if dims == 1 else functional.conv2d
    scaled = weight.float() * scales.view(-1, 1, *[1] * dims)
    want = function(convolve(0.02 * (x.float() - 3), scaled))
    torch.testing.assert_close(run(), want, rtol=1e-4, atol=1e-4)


def test_signed_activations_are_refused() -> None:
    assert torch.int8 not in RULES.activation_dtypes
    weight = integers(-127, 128, 8, 4, 3, 3, dtype=torch.int8)
    scales = torch.ones(8)
    packed = onednn.qconv_prepack(weight, scales, 0.02, 0, [1, 1], [0, 0], [1, 1], 1, None)

    with pytest.raises(RuntimeError, match="uint8"):
        onednn.qconv_pointwise(
            integers(-9, 9, 1, 4, 6, 6, dtype=torch.int8), 0.02, 0, packed, scales,
            torch.zeros(8, dtype=torch.int64), None, [1, 1], [0, 0], [1, 1], 1,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
