"""The interleaved measuring, with timers that say what we tell them."""

import itertools
from collections.abc import Callable

import pytest

from versatil_core.latency import LatencySummary, measure_interleaved, timed


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
    assert calls == 2  # the warm-up and the call that says how long one takes
    assert sample() == 0.25
    assert calls == 2 + 4


def test_timed_does_not_count_the_warm_up() -> None:
    durations = itertools.chain([100.0], itertools.repeat(2.0))  # the first call compiles
    clock = 0.0

    def call() -> None:
        nonlocal clock
        clock += next(durations)

    assert timed(call, timer=lambda: clock)() == 2.0


def test_timed_survives_a_timer_too_coarse_for_one_call() -> None:
    assert timed(lambda: None, timer=lambda: 0.0)() == 0.0
