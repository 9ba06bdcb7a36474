"""Quantizes weights so that no pair of products saturates on a CPU without VNNI.

Without VNNI, oneDNN multiplies with ``vpmaddubsw`` (Intel 64 and IA-32 Architectures Software Developer's Manual,
volume 2, PMADDUBSW): u8 activations times s8 weights, and the two products of each neighbouring pair are added into a
signed 16-bit value that *saturates* at -32768 and 32767. With activations ``a`` between 0 and ``A`` and the weights
``w0``, ``w1`` of a pair,

    -A * (w0- + w1-)  <=  a0 * w0 + a1 * w1  <=  A * (w0+ + w1+),

where ``w+`` is the weight if it is positive, ``w-`` its magnitude if it is negative, and 0 otherwise; both bounds are
reached. So nothing saturates, for no input, exactly if both sums are at most ``floor(32767 / A)``; for all 8 bits of
the activation, ``A = 255``, that is 128. (32768 / 255 is 128.5: the negative side gains nothing.) ``A`` is the
``quant_max`` of the activation's quantize, not what calibration saw: an input beyond the calibrated range is clamped
to ``quant_max``.

Which features are a pair was measured, see ``docs/explanation/saturation.md``.
"""

import torch

from versatil_passes.saturating_pairs import SaturatingPairs
from versatil_x86.int8_weight import QuantizedWeight, along_channels

PAIRS_WITHOUT_VNNI = SaturatingPairs(
    accumulator_max=32767,
    # oneDNN's int8 matrix product cuts more than 256 (AVX2) or 384 (AVX-512) features into two blocks.
    uncut_features=256,
    cause="this CPU has no VNNI, and its int8 kernels add two products in 16 bits, which saturates",
    remedy=(
        "Rescale the weights with versatil_x86.make_saturation_safe(reference), which needs no calibration, or "
        "quantize again with X86InductorBackend.for_host()"
    ),
)
# Symmetric, so that a weight and its negative are equally exact.
WEIGHT_MAX = 127
# Parts of the plain scale to try. A smaller scale has finer steps, and clips the few pairs that the plain one covers
# just so. Below 0.95, at 8 bits, clipping costs more than the steps gain.
SCALE_SHARES = (1.0, 0.99, 0.98, 0.97, 0.96, 0.95)
# More than float32 loses in a division, so that a pair stays below the limit; costs 0.0001 dB.
_ROUNDING_MARGIN = 1 + 1e-5
_SMALLEST_SCALE = torch.finfo(torch.float32).eps


def plain_scale(
    weight: torch.Tensor, activation_max: int, pairs: SaturatingPairs = PAIRS_WITHOUT_VNNI
) -> torch.Tensor:
    """The smallest scale for which nothing has to be clipped.

    It maps the largest pair of a channel to just below the limit. Then the bound holds after rounding, too: rounding
    adds at most one half to each of the two, so that their sum stays below ``limit + 1``, and it is an integer.

    Args:
        weight: Float ``[out_channels, in_channels / groups, *kernel]``.
        activation_max: ``quant_max`` of the layer's activation.
        pairs: Which weights are a pair.

    Returns:
        For each output channel ``max(|w| / 127, pair sum / limit)`` and a hair, float32 ``[out_channels]``, above 0.
    """
    weight = weight.to(torch.float32)
    largest = weight.abs().flatten(1).amax(1) if weight.numel() else weight.new_zeros(len(weight))
    # Divided before they are added: two weights near float32's end would add up to infinity.
    covering_pairs = pairs.largest_sums(weight / pairs.limit(activation_max))
    scale = torch.maximum(largest / WEIGHT_MAX, covering_pairs) * _ROUNDING_MARGIN
    return scale.clamp(min=_SMALLEST_SCALE)


def round_within_pairs(
    weight: torch.Tensor,
    scale: torch.Tensor,
    activation_max: int,
    pairs: SaturatingPairs = PAIRS_WITHOUT_VNNI,
) -> QuantizedWeight:
    """Round to int8 such that no pair can saturate, whatever the scale.

    At a scale below the plain one, some pairs are too large. Each is replaced by the nearest pair that is not: of all
    integers ``q0 + q1 = limit``, those with the least ``(w0 - q0)**2 + (w1 - q1)**2``, where ``q0 = round((w0 - w1 +
    limit) / 2)``.

    Args:
        weight: Float ``[out_channels, in_channels / groups, *kernel]``.
        scale: One for each output channel, ``[out_channels]``.
        activation_max: ``quant_max`` of the layer's activation.
        pairs: Which weights are a pair.
    """
    scaled = weight.to(torch.float32) / along_channels(scale, weight)
    scaled = scaled.clamp(-WEIGHT_MAX, WEIGHT_MAX)
    limit = pairs.limit(activation_max)
    for first in pairs.first_features(weight):  # the second turn only makes magnitudes smaller
        scaled = _clip_pairs(scaled, limit, first)
    return QuantizedWeight(scaled.round().to(torch.int8), scale)


def candidates(
    weight: torch.Tensor, activation_max: int, pairs: SaturatingPairs = PAIRS_WITHOUT_VNNI
) -> list[QuantizedWeight]:
    """The weight at the plain scale, then at each of the smaller ``SCALE_SHARES`` of it."""
    scale = plain_scale(weight, activation_max, pairs)
    return [
        round_within_pairs(weight, scale * share, activation_max, pairs) for share in SCALE_SHARES
    ]


def best_of(quantized: list[QuantizedWeight], errors: torch.Tensor) -> QuantizedWeight:
    """Take for each output channel the candidate with the least error; the first one, if several have it.

    Args:
        quantized: The candidates.
        errors: ``[len(quantized), out_channels]``.
    """
    choice = errors.argmin(0)
    channels = torch.arange(len(choice))
    return QuantizedWeight(
        torch.stack([candidate.values for candidate in quantized])[choice, channels],
        torch.stack([candidate.scale for candidate in quantized])[choice, channels],
    )


def weight_errors(weight: torch.Tensor, quantized: list[QuantizedWeight]) -> torch.Tensor:
    """Squared error of each candidate and output channel, ``[len(quantized), out_channels]``."""
    return torch.stack(
        [(candidate.dequantize() - weight).square().flatten(1).sum(1) for candidate in quantized]
    )


def _clip_pairs(scaled: torch.Tensor, limit: int, first: int) -> torch.Tensor:
    """Move each pair ``(first + 2i, first + 2i + 1)`` along dim 1 whose rounded sum exceeds ``limit`` onto it."""
    clipped = scaled.clone()
    right = clipped[:, first + 1 :: 2]  # both are views
    left = clipped[:, first::2][:, : right.shape[1]]
    for sign in (1, -1):
        a, b = (sign * left).clamp(min=0), (sign * right).clamp(min=0)
        is_over = a.round() + b.round() > limit
        if not bool(is_over.any()):
            continue
        nearest = ((a - b + limit) / 2).round().clamp(limit - WEIGHT_MAX, WEIGHT_MAX)
        left.copy_(torch.where(is_over, sign * nearest, left))
        right.copy_(torch.where(is_over, sign * (limit - nearest), right))
    return clipped
