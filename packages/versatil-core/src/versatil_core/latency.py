"""Compare the latency of several callables in one interleaved run.

Two runs after each other compare the machine's two moods as much as the two models: a
neighbour on the same host, a changed clock speed. So the candidates take turns, each
round starts with another one, and a ratio is formed within each round before the median
is taken over the rounds.

When a ratio counts as a difference (:func:`judge`): the confidence interval of its median
decides, from the order of the rounds' ratios alone, whatever their distribution is. Faster or
slower is what lies wholly beyond `MIN_DIFFERENCE`; the same is what lies wholly within
`MAX_SAME`; of all else the machine was too noisy to tell.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "Judgement",
    "LatencyComparison",
    "LatencySummary",
    "Timing",
    "is_unsteady",
    "judge",
    "measure_interleaved",
    "median_interval",
    "timed",
]

MIN_SAMPLE_SECONDS = 0.01
"""A sample lasts at least this long, so that the timer's own cost doesn't show."""
CONFIDENCE = 0.95
"""How often the interval of `median_interval` holds the true median, if rounds are independent."""
MIN_DIFFERENCE = 1.02
"""Ratios nearer to 1 come from where code happens to lie in memory; another build has others."""
MAX_SAME = 1.05
"""Nobody notices a ratio nearer to 1."""
UNSTEADY_SHARE = 0.25
"""Of the median: samples whose middle half is wider are those of a busy machine."""


class Judgement(StrEnum):
    """What one ratio of latencies says about the second of the two."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME_SPEED = "same_speed"
    TOO_NOISY = "too_noisy"


@dataclass(frozen=True)
class Timing:
    """A median, and the range that holds the middle half: of seconds per call, or of ratios."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class LatencySummary:
    """One candidate's samples, in seconds per call, in the order of the rounds."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The range that holds the middle half of the samples, in seconds per call."""
        return _quartiles(self.samples)

    @property
    def timing(self) -> Timing:
        """Both."""
        return Timing(self.median, *self.quartiles)


@dataclass(frozen=True)
class LatencyComparison:
    """What one interleaved run measured, by candidate name."""

    by_name: Mapping[str, LatencySummary]

    def ratios(self, numerator: str, denominator: str) -> tuple[float, ...]:
        """One ratio of seconds for each round, so that slow rounds weigh on both sides."""
        pairs = zip(self.by_name[numerator].samples, self.by_name[denominator].samples, strict=True)
        return tuple(above / below for above, below in pairs)

    def ratio(self, numerator: str, denominator: str) -> float:
        """Median over the rounds of ``numerator`` seconds / ``denominator`` seconds."""
        return statistics.median(self.ratios(numerator, denominator))

    def ratio_quartiles(self, numerator: str, denominator: str) -> tuple[float, float]:
        """The range that holds the middle half of the rounds' ratios."""
        return _quartiles(self.ratios(numerator, denominator))

    def ratio_timing(self, numerator: str, denominator: str) -> Timing:
        """Both."""
        return Timing(
            self.ratio(numerator, denominator), *self.ratio_quartiles(numerator, denominator)
        )


def measure_interleaved(
    candidates: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    on_round: Callable[[], None] | None = None,
) -> LatencyComparison:
    """Let the candidates take turns for ``rounds`` rounds.

    Args:
        candidates: Each returns the seconds that one call of it took; see `timed`, or
            ask a worker process. Warm them up before.
        rounds: Samples per candidate, at least 1.
        on_round: Called after each round, for a progress bar.

    Returns:
        The samples of each candidate.

    Raises:
        ValueError: ``rounds`` is below 1, or there is no candidate.

    Example:
        >>> result = measure_interleaved({"a": lambda: 2.0, "b": lambda: 1.0}, rounds=3)
        >>> result.ratio("a", "b")
        2.0
    """
    if rounds < 1 or not candidates:
        raise ValueError(
            f"measuring needs a candidate and a round, got {len(candidates)} and {rounds}"
        )
    names = list(candidates)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(candidates[name]())
        if on_round is not None:
            on_round()
    return LatencyComparison({name: LatencySummary(tuple(samples[name])) for name in names})


def timed(
    call: Callable[[], object],
    *,
    timer: Callable[[], float] = time.perf_counter,
    min_sample_seconds: float = MIN_SAMPLE_SECONDS,
) -> Callable[[], float]:
    """Warm ``call`` up and return a function that measures it.

    Args:
        call: What to measure. Called four times here; the first call may compile.
        timer: Returns seconds; another one makes a test exact.
        min_sample_seconds: A shorter call is repeated until a sample lasts this long.

    Returns:
        A function that returns the mean seconds per call of one sample.
    """

    def sample(repeats: int) -> float:
        start = timer()
        for _ in range(repeats):
            call()
        return (timer() - start) / repeats

    call()
    one_call = min(sample(1) for _ in range(3))  # one that happens to be slow must not decide
    repeats = 1 if one_call <= 0 else max(1, math.ceil(min_sample_seconds / one_call))
    return lambda: sample(repeats)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the range that holds the median with a confidence of at least `CONFIDENCE`.

    The ``k``-th smallest and the ``k``-th largest value, for the largest ``k`` such that so many
    fair coins show less than ``k`` heads with at most half of the remaining probability
    (NIST/SEMATECH e-Handbook of Statistical Methods, "confidence intervals for percentiles").
    Less than six values are too few: their smallest and their largest are returned.

    Example:
        >>> median_interval([1, 2, 3, 4, 5, 6, 7, 8, 9])
        (2, 8)
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if tail > (1 - CONFIDENCE) / 2:
            break
        rank += 1
    kept = max(rank, 1)
    return ordered[kept - 1], ordered[count - kept]


def judge(ratios: Sequence[float]) -> Judgement:
    """Say whether the denominator of a ratio of latencies is faster.

    Args:
        ratios: One for each round, such as `LatencyComparison.ratios` returns.

    Example:
        >>> judge([2.0] * 10)
        <Judgement.FASTER: 'faster'>
    """
    low, high = median_interval(ratios)
    if low > MIN_DIFFERENCE:
        return Judgement.FASTER
    if high < 1 / MIN_DIFFERENCE:
        return Judgement.SLOWER
    if low >= 1 / MAX_SAME and high <= MAX_SAME:
        return Judgement.SAME_SPEED
    return Judgement.TOO_NOISY


def is_unsteady(median: float, low: float, high: float) -> bool:
    """Whether samples with this median and this middle half come from a busy machine."""
    return high - low > UNSTEADY_SHARE * median


def _quartiles(values: tuple[float, ...]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
