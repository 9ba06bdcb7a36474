"""Where a kernel adds two products into a value that saturates, and for which weights it cannot."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SaturatingPairs:
    """How the int8 kernels of one kind of CPU pair products up.

    Such a kernel multiplies unsigned activations by int8 weights, and adds the products of two neighbouring input
    features (of a convolution: of two neighbouring input channels at the same kernel position) into a value that
    saturates. An activation is never negative, so two weights of opposite sign cannot do harm: what counts is the
    sum of two weights of the same sign, and of a lone one.

    Attributes:
        accumulator_max: Largest value of the sum of two products. The smallest is at least as far from zero.
        uncut_features: Number of input features up to which a linear is never cut. Longer ones may be computed in
            two blocks, and if the first has an odd number of features, those of the second are paired the other
            way: ``(2i+1, 2i+2)`` instead of ``(2i, 2i+1)``.
        cause: What about the CPU makes its kernels so; for messages, without a full stop.
        remedy: What a user can do about a model that may saturate; for messages, likewise.

    Example:
        >>> pairs = SaturatingPairs(accumulator_max=32767, uncut_features=256)
        >>> pairs.limit(activation_max=255)
        128
        >>> pairs.largest_sums(torch.tensor([[100, 50, -100, 60]], dtype=torch.int8)).tolist()
        [150]
    """

    accumulator_max: int
    uncut_features: int
    cause: str = "the kernels add two products into a value that saturates"
    remedy: str = "Quantize the model again for this CPU"

    def limit(self, activation_max: int) -> int:
        """The largest sum of two weights of the same sign for which no pair of products saturates.

        Args:
            activation_max: The largest quantized activation: ``quant_max`` of its quantize, to which every value
                beyond the calibrated range is clamped.

        Returns:
            ``floor(accumulator_max / activation_max)``, since ``a0 * w0 + a1 * w1 <= activation_max * (w0 + w1)``
            for activations between 0 and ``activation_max``.
        """
        return self.accumulator_max // activation_max

    def first_features(self, weight: torch.Tensor) -> tuple[int, ...]:
        """Where pairing starts: 0 for the pairs ``(2i, 2i+1)``, 1 for ``(2i+1, 2i+2)``; both where both may occur.

        Args:
            weight: ``[out_features, in_features]``, or ``[out_channels, in_channels / groups, *kernel]``.
        """
        features = weight.shape[1]
        is_linear = weight.dim() == 2
        # Two blocks, the first of which has half of the features, rounded up.
        may_shift = is_linear and features > self.uncut_features and (features + 1) // 2 % 2 == 1
        return (0, 1) if may_shift else (0,)

    def largest_sums(self, weight: torch.Tensor) -> torch.Tensor:
        """The largest magnitude that the weights of one pair, or a lone weight, add up to.

        Args:
            weight: ``[out_features, in_features]``, or ``[out_channels, in_channels / groups, *kernel]``; int8, or
                float (weights before rounding).

        Returns:
            One value for each output channel, ``[out_channels]``; int32 for int8.
        """
        if weight.dtype is torch.int8:
            weight = weight.to(torch.int32)  # -128 has no magnitude in int8, and sums need room
        flat = weight.flatten(2) if weight.dim() > 2 else weight.unsqueeze(2)
        sums = [flat.abs()] if flat.numel() else [flat.new_zeros(len(flat), 1, 1)]
        for start in self.first_features(weight):
            second = flat[:, start + 1 :: 2]
            first = flat[:, start::2][:, : second.shape[1]]
            if second.numel():
                sums.append(first.clamp(min=0) + second.clamp(min=0))
                sums.append(first.clamp(max=0).abs() + second.clamp(max=0).abs())
        return torch.stack([values.amax((1, 2)) for values in sums]).amax(0)
