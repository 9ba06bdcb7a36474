"""Observers of activations that can be asked for by name: how a range is chosen from what calibration shows.

All but ``min_max`` and ``moving_average`` cut off values that are rare, so that the rest gets smaller steps:

- ``percentile`` keeps 99.99 % of the values;
- ``mse`` has the least mean squared error of rounding and clipping;
- ``entropy`` has the least Kullback-Leibler divergence between the values and what becomes of them (Migacz, "8-bit
  inference with TensorRT", GTC 2017, there for symmetric ranges);
- ``histogram`` is torchao's search for the least squared error, which backends use by default.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torchao.quantization.pt2e import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    UniformQuantizationObserverBase,
)

_BINS = 8192
_LEAST_MAGNITUDE = 2.0**-60
_KEPT = 0.9999
# Ends of the range that are tried, as parts of the smallest and the largest value.
_PARTS = tuple(part / 40 for part in range(8, 41))


class ValueCounts(torch.nn.Module):
    """Counts values in bins of equal width around zero; the width doubles when a value does not fit.

    Widths are powers of two, and doubling merges pairs of bins: so a value's bin is exact, and counts and width do not
    depend on the order of the batches.
    """

    counts: torch.Tensor
    limit: torch.Tensor

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.register_buffer("counts", torch.zeros(_BINS, dtype=torch.float64))
        self.register_buffer("limit", torch.zeros((), dtype=torch.float64))

    def add(self, values: torch.Tensor) -> None:
        """Count values.

        Args:
            values: Finite, of any shape and float dtype.
        """
        flat = values.detach().flatten().double()
        if not flat.numel():
            return
        _, exponent = math.frexp(max(float(flat.abs().max()), _LEAST_MAGNITUDE))
        needed = 2.0**exponent  # greater than every magnitude
        if float(self.limit) == 0.0:
            self.limit.fill_(needed)
        while needed > float(self.limit):
            self._double()
        # Not histc: it adds the limit first, which rounds a small negative value up to zero.
        bins = (flat / self.width).floor().long() + _BINS // 2
        self.counts += torch.bincount(bins, minlength=_BINS)

    def _double(self) -> None:
        merged = self.counts.reshape(-1, 2).sum(1)
        self.counts.zero_()
        self.counts[_BINS // 4 : 3 * _BINS // 4] = merged
        self.limit.mul_(2)

    @property
    def width(self) -> float:
        """Width of a bin."""
        return float(2 * self.limit / _BINS)

    @property
    def centers(self) -> torch.Tensor:
        """The middle of each bin."""
        return -self.limit + (torch.arange(_BINS, dtype=torch.float64) + 0.5) * self.width

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The middle and the count of each bin that holds a value."""
        is_seen = self.counts > 0
        return self.centers[is_seen], self.counts[is_seen]


class _CountingObserver(UniformQuantizationObserverBase):
    """Counts values; a subclass chooses the range from the counts."""

    min_val: torch.Tensor
    max_val: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As torchao's observers."""
        super().__init__(*args, **kwargs)
        self.values = ValueCounts()
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))

    def forward(self, x_orig: torch.Tensor) -> torch.Tensor:
        """Count the values and return them."""
        if x_orig.numel():
            self.values.add(x_orig)
            self.min_val = torch.minimum(self.min_val, x_orig.detach().min().float())
            self.max_val = torch.maximum(self.max_val, x_orig.detach().max().float())
        return x_orig

    def calculate_qparams(self, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 - as in torchao
        """Return scale and zero_point of the chosen range."""
        if float(self.min_val) >= float(self.max_val):  # nothing seen, or one value
            low, high = self.min_val, self.max_val
        else:
            low, high = (torch.tensor(end, dtype=torch.float32) for end in self.chosen_range())
        qparams: tuple[torch.Tensor, torch.Tensor] = self._calculate_qparams(low, high)
        return qparams

    def chosen_range(self) -> tuple[float, float]:
        """The smallest and the largest value that are not cut off."""
        raise NotImplementedError

    def _best(self, cost: Callable[[float, float], float]) -> tuple[float, float]:
        """The range of least cost, among parts of what was seen; the whole wins if nothing is better."""
        low, high = min(float(self.min_val), 0.0), max(float(self.max_val), 0.0)
        lows = [low * part for part in _PARTS] if low < 0 else [0.0]
        highs = [high * part for part in _PARTS] if high > 0 else [0.0]
        tried = [(high - low, low, high) for low in lows for high in highs if high > low]
        # Widest first, and the first of equals is taken.
        _, low, high = min(sorted(tried, reverse=True), key=lambda each: cost(each[1], each[2]))
        return low, high


class PercentileObserver(_CountingObserver):
    """Keeps 99.99 % of the values; the rest, half of it at each end, is cut off."""

    def chosen_range(self) -> tuple[float, float]:
        """The percentiles, to the width of a bin."""
        share = self.values.counts.cumsum(0) / self.values.counts.sum()
        centers, rest = self.values.centers, (1 - _KEPT) / 2
        low = float(centers[int(torch.searchsorted(share, rest))])
        high = float(centers[min(int(torch.searchsorted(share, 1 - rest)), _BINS - 1)])
        return max(low, float(self.min_val)), min(high, float(self.max_val))


class MSEObserver(_CountingObserver):
    """Chooses the range with the least mean squared error."""

    def chosen_range(self) -> tuple[float, float]:
        """Found by trying."""
        centers, counts = self.values.seen()

        def error(low: float, high: float) -> float:
            step = (high - low) / (self.quant_max - self.quant_min)
            rounded = ((centers.clamp(low, high) - low) / step).round() * step + low
            return float(((rounded - centers).square() * counts).sum())

        return self._best(error)


class EntropyObserver(_CountingObserver):
    """Chooses the range that loses the least information."""

    def chosen_range(self) -> tuple[float, float]:
        """Found by trying."""
        centers, counts = self.values.seen()
        width = self.values.width
        # Whatever the range, a zero stays a zero: it has nothing to say. But the half of all values
        # that a relu made zero would share a level with a few others, and the finer the steps, the
        # fewer: that outweighed all that was cut off.
        is_away = centers.abs() > width
        centers, counts = centers[is_away], counts[is_away]

        def divergence(low: float, high: float) -> float:
            inside = (centers >= low - width) & (centers <= high + width)
            if not bool(inside.any()):
                return float("inf")
            kept = counts[inside]
            # What is cut off counts at the ends of P, and Q knows nothing of it.
            p = kept.clone()
            p[0] += counts[centers < low - width].sum()
            p[-1] += counts[centers > high + width].sum()
            step = (high - low) / (self.quant_max - self.quant_min)
            levels = ((centers[inside].clamp(low, high) - low) / step).round().long()
            # Q spreads what is in a level evenly over those of its bins that hold anything.
            empty = torch.zeros(self.quant_max - self.quant_min + 1, dtype=torch.float64)
            sums = empty.index_add(0, levels, kept)
            bins = empty.index_add(0, levels, kept.sign())
            q = (sums / bins)[levels]
            p, q = p / p.sum(), q / p.sum()
            # Q is not scaled up to a sum of 1, or a range of a single bin would look perfect.
            # This is Csiszar's I-divergence: to first order in what is cut off, they are the same.
            return float((p * (p / q).log() - p + q).sum())

        return self._best(divergence)


OBSERVERS: dict[str, Any] = {
    "min_max": MinMaxObserver,
    "moving_average": MovingAverageMinMaxObserver,
    "percentile": PercentileObserver,
    "mse": MSEObserver,
    "entropy": EntropyObserver,
    "histogram": HistogramObserver,
}
"""Name to class of each observer of activations."""
