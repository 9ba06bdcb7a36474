"""The interleaved measuring, with timers that say what we tell them."""

import itertools
from collections.abc import Callable
from random import Random

import pytest

from versatil_core.latency import (
    Judgement,
    LatencySummary,
    is_unsteady,
    judge,
    measure_interleaved,
    median_interval,
    timed,
)


def scripted(seconds: list[float]) -> Callable[[], float]:
    return iter(seconds).__next__


def test_candidates_take_turns_and_each_round_starts_with_another() -> None:
    order: list[str] = []

    def candidate(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return 1.0

        return run

    measure_interleaved({name: candidate(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abcbcacab"


def test_ratio_is_formed_within_a_round() -> None:
    # In the second round the machine is ten times slower for both: the ratio stays 2,
    # while the ratio of the medians would be 2 / 10.
    result = measure_interleaved(
        {"float": scripted([2.0, 20.0, 2.0]), "int8": scripted([1.0, 10.0, 1.0])}, rounds=3
    )
    assert result.ratios("float", "int8") == (2.0, 2.0, 2.0)
    assert result.ratio("float", "int8") == 2.0
    assert result.ratio("int8", "float") == 0.5
    assert result.ratio_quartiles("float", "int8") == (2.0, 2.0)


def test_median_and_quartiles() -> None:
    summary = LatencySummary((5.0, 1.0, 2.0, 4.0, 3.0))
    assert summary.median == 3.0
    assert summary.quartiles == (2.0, 4.0)
    assert LatencySummary((7.0,)).quartiles == (7.0, 7.0)


def test_on_round_is_called_once_a_round() -> None:
    rounds: list[None] = []
    measure_interleaved({"a": lambda: 1.0}, rounds=4, on_round=lambda: rounds.append(None))
    assert len(rounds) == 4


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_round_is_an_error(rounds: int) -> None:
    with pytest.raises(ValueError, match=f"got 1 and {rounds}"):
        measure_interleaved({"a": lambda: 1.0}, rounds=rounds)


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 0 and 1"):
        measure_interleaved({}, rounds=1)


def test_timed_repeats_a_short_call_until_the_sample_is_long_enough() -> None:
    clock = 0.0
    calls = 0

    def call() -> None:
        nonlocal clock, calls
        clock += 0.25
        calls += 1

    sample = timed(call, timer=lambda: clock, min_sample_seconds=1.0)
    assert calls == 4  # the warm-up and the calls that say how long one takes
    assert sample() == 0.25
    assert calls == 4 + 4


def test_timed_is_not_misled_by_one_slow_call() -> None:
    durations = itertools.chain([1.0, 1.0], itertools.repeat(0.25))
    clock = 0.0

    def call() -> None:
        nonlocal clock
        clock += next(durations)

    timed(call, timer=lambda: clock, min_sample_seconds=1.0)()
    assert clock == 1.0 + 1.0 + 2 * 0.25 + 4 * 0.25


def test_timed_does_not_count_the_warm_up() -> None:
    durations = itertools.chain([100.0], itertools.repeat(2.0))  # the first call compiles
    clock = 0.0

    def call() -> None:
        nonlocal clock
        clock += next(durations)

    assert timed(call, timer=lambda: clock)() == 2.0


def test_timed_survives_a_timer_too_coarse_for_one_call() -> None:
    assert timed(lambda: None, timer=lambda: 0.0)() == 0.0


@pytest.mark.parametrize(
    ("count", "expected"),
    # Ranks as in tables of the sign test, at 5 %, two-sided.
    [
        *(
            (1, (1, 1)),
            (2, (1, 2)),
            (5, (1, 5)),
            (6, (1, 6)),
            (8, (1, 8)),
            (9, (2, 8)),
            (10, (2, 9)),
        ),
        *((20, (6, 15)), (30, (10, 21)), (40, (14, 27))),
    ],
)
def test_median_interval(count: int, expected: tuple[int, int]) -> None:
    values = [*range(1, count + 1)]
    assert median_interval(values[::-1]) == expected


def test_median_interval_holds_the_median_as_often_as_it_says() -> None:
    """The true median of these is 0: at most 5 % of the intervals may miss it."""
    random = Random(0)  # noqa: S311 -- no secret
    intervals = [median_interval([random.gauss(0, 1) for _ in range(30)]) for _ in range(2000)]
    held = sum(low <= 0 <= high for low, high in intervals) / len(intervals)
    assert 0.94 < held < 0.98


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([2.0] * 10, Judgement.FASTER),
        ([0.5] * 10, Judgement.SLOWER),
        ([1.03] * 10, Judgement.FASTER),
        ([1.01] * 10, Judgement.SAME_SPEED),
        ([0.99] * 10, Judgement.SAME_SPEED),
        # Clearly apart, however wide: a slow neighbour in a few rounds changes nothing.
        ([1.5, 1.5, 1.6, 1.4, 1.5, 1.5, 9.0, 0.2, 1.5, 1.5], Judgement.FASTER),
        # Half of the rounds on either side of 1.
        ([0.7, 1.4] * 10, Judgement.TOO_NOISY),
        ([1.0, 1.2] * 10, Judgement.TOO_NOISY),
    ],
)
def test_judge(ratios: list[float], expected: Judgement) -> None:
    assert judge(ratios) is expected


def test_a_busy_machine_is_noticed() -> None:
    assert is_unsteady(median=1.0, low=0.9, high=1.2)
    assert not is_unsteady(median=1.0, low=0.9, high=1.1)
