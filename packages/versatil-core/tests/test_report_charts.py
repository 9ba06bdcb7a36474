"""Marks lie where the numbers say, in percent across and in pixels down."""

import itertools
import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from versatil_core.report_charts import (
    EQUAL_Y,
    LAYERS_PER_ROW,
    PLOT_BOTTOM,
    PLOT_TOP,
    error_chart,
    histogram_outline,
    range_picture,
    round_ticks,
    speed_bars,
    time_chart,
)

SAMPLES: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("report_samples.py")))
LAYER = SAMPLES["layer"](0, "layer")
# Values from -1 to 2 on a grid from -2 to 3.1, of which 0.1 is the unit below.
RANGE = SAMPLES["activation"](0, "reader", low=-1.0, high=2.0)


def with_errors(introduced: float, accumulated: float) -> Any:
    accuracy = replace(LAYER.accuracy, introduced_db=introduced, accumulated_db=accumulated)
    return replace(LAYER, accuracy=accuracy)


def with_seconds(of_float: float | None, of_int8: float | None) -> Any:
    runs = (
        None if each is None else replace(LAYER.int8_run, seconds=each)
        for each in (of_float, of_int8)
    )
    return replace(LAYER, float_run=next(runs), int8_run=next(runs))


def height(share: float) -> float:
    """Where a value lies that is this share of the axis above its lower end."""
    return PLOT_BOTTOM - share * (PLOT_BOTTOM - PLOT_TOP)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (18.2, 61.0, (0, 20, 40, 60, 80)),
        (0.0, 4.0, (0, 1, 2, 3, 4)),
        (0.0, 0.0023, (0, 0.001, 0.002, 0.003)),
        (0.0, 0.0, (0, 0.25)),
        (40.0, 40.0, (40, 50)),
        (-3.0, 12.0, (-5, 0, 5, 10, 15)),
    ],
)
def test_ticks_are_round_and_hold_all_values(
    low: float, high: float, ticks: tuple[float, ...]
) -> None:
    assert round_ticks(low, high) == pytest.approx(ticks)


def test_errors_lie_on_their_axis() -> None:
    chart = error_chart([with_errors(40.0, 30.0), with_errors(20.0, 25.0)])
    assert chart is not None

    assert [tick.label for tick in chart.ticks] == ["20", "25", "30", "35", "40"]
    assert [tick.at for tick in chart.ticks] == pytest.approx(
        [height(share) for share in (0, 0.25, 0.5, 0.75, 1)]
    )
    [row] = chart.rows
    assert [mark.x for mark in row.marks] == [25.0, 75.0]
    assert [mark.ys for mark in row.marks] == [
        pytest.approx((height(1), height(0.5))),
        pytest.approx((height(0), height(0.25))),
    ]
    assert not chart.has_equal


def test_errors_that_have_no_number() -> None:
    no_accuracy = replace(LAYER, accuracy=None)
    layers = [with_errors(math.inf, 40.0), with_errors(-math.inf, math.nan), no_accuracy]
    chart = error_chart(layers)
    assert chart is not None

    equal, lost, unknown = (mark.ys for mark in chart.rows[0].marks)
    assert equal == pytest.approx((EQUAL_Y, height(0)))
    assert lost == pytest.approx((height(0), None))
    assert unknown == (None, None)
    assert chart.has_equal
    assert error_chart([no_accuracy]) is None


def test_only_equal_layers_still_have_an_axis() -> None:
    chart = error_chart([with_errors(math.inf, math.inf)])
    assert chart is not None

    assert len(chart.ticks) > 1
    assert chart.rows[0].marks[0].ys == (EQUAL_Y, EQUAL_Y)


def test_times_begin_with_zero() -> None:
    chart = time_chart([with_seconds(4e-3, 1e-3), with_seconds(None, 2e-3)], 1e-3)
    assert chart is not None

    assert [tick.label for tick in chart.ticks] == ["0", "1", "2", "3", "4"]
    first, second = (mark.ys for mark in chart.rows[0].marks)
    assert first == pytest.approx((height(1), height(0.25)))
    assert second == pytest.approx((None, height(0.5)))
    assert time_chart([with_seconds(None, None)], 1e-3) is None


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (1, [1]),
        (3, [3]),
        (LAYERS_PER_ROW, [LAYERS_PER_ROW]),
        (LAYERS_PER_ROW + 1, [31, 30]),
        (300, [60] * 5),
    ],
)
def test_layers_are_shared_out_evenly(count: int, sizes: list[int]) -> None:
    chart = time_chart([LAYER] * count, 1e-3)
    assert chart is not None

    assert [len(row.marks) for row in chart.rows] == sizes
    assert [mark.number for row in chart.rows for mark in row.marks] == [*range(1, count + 1)]
    for row in chart.rows:
        # In one column, whatever the row: the last one may be shorter.
        assert [mark.x for mark in row.marks] == pytest.approx(
            [(index + 0.5) * 100 / sizes[0] for index in range(len(row.marks))]
        )
        assert row.numbers[0].label == str(row.marks[0].number)
        assert {tick.at for tick in row.numbers} <= {mark.x for mark in row.marks}


def test_numbers_do_not_run_into_one_another() -> None:
    chart = time_chart([LAYER] * 300, 1e-3)
    assert chart is not None

    for row in chart.rows:
        places = [tick.at for tick in row.numbers]
        gaps = [after - before for before, after in itertools.pairwise(places)]
        assert min(gaps) >= 4 * row.step - 1e-9


def test_a_range_inside_its_grid() -> None:
    picture = range_picture(RANGE)

    unit = 100 / 51
    assert (picture.grid.start, picture.grid.width) == pytest.approx((0, 100))
    assert (picture.seen.start, picture.seen.width) == pytest.approx((10 * unit, 30 * unit))
    assert (picture.bars.start, picture.bars.width) == pytest.approx((10 * unit, 30 * unit))
    assert picture.zero == pytest.approx(20 * unit)
    percentiles = RANGE.percentiles
    assert picture.middle.start == pytest.approx((10 * percentiles["1"] + 20) * unit)
    assert picture.middle.end == pytest.approx((10 * percentiles["99"] + 20) * unit)
    assert picture.median == pytest.approx((10 * percentiles["50"] + 20) * unit)
    assert (picture.clipped, picture.is_cut, picture.bins) == ((), (False, False), 48)


def test_what_is_clipped_lies_outside_the_grid() -> None:
    picture = range_picture(replace(RANGE, minimum=-3.0, maximum=7.0))

    assert picture.grid.start == pytest.approx(10)
    assert picture.grid.end == pytest.approx(61)
    below, above = picture.clipped
    assert (below.start, below.end) == pytest.approx((0, 10))
    assert (above.start, above.end) == pytest.approx((61, 100))
    assert picture.is_cut == (False, False)


def test_far_values_do_not_squeeze_the_grid() -> None:
    picture = range_picture(replace(RANGE, minimum=0.0, maximum=1000.0))

    assert picture.grid.end == pytest.approx(50)
    assert picture.seen.end == pytest.approx(100)
    assert picture.is_cut == (False, True)
    below = range_picture(replace(RANGE, minimum=-1000.0, maximum=0.0))
    assert below.grid.start == pytest.approx(50)
    assert below.is_cut == (True, False)
    # The bars keep their scale; the picture cuts them.
    assert picture.bars.width == pytest.approx(1000 / 10.2 * 100)


@pytest.mark.parametrize(
    "values",
    [
        {"minimum": 0.5, "maximum": 0.5},
        {"minimum": -math.inf, "maximum": 1.0},
        {"minimum": 5.0, "maximum": 6.0},
        {"quant_min": 0, "quant_max": 0, "zero_point": 0, "minimum": 0.0, "maximum": 0.0},
    ],
)
def test_every_place_is_in_the_picture(values: dict[str, Any]) -> None:
    picture = range_picture(replace(RANGE, **values))

    for span in (picture.grid, picture.seen, picture.middle, *picture.clipped):
        assert 0 <= span.start <= span.end <= 100 + 1e-9
    assert 0 <= picture.median <= 100
    assert math.isfinite(picture.bars.start + picture.bars.width)
    assert bool(picture.histogram) == (values["minimum"] == 5.0)


def test_a_range_beyond_its_grid_is_clipped_as_a_whole() -> None:
    picture = range_picture(replace(RANGE, minimum=5.0, maximum=6.0))

    assert picture.clipped == (picture.seen,)


@pytest.mark.parametrize(
    ("counts", "path"),
    [
        ((1, 4), "M0 1V.5H1V0H2V1Z"),
        ((0, 9, 1), "M0 1V1H1V0H2V.67H3V1Z"),
        ((0, 0), "M0 1V1H1V1H2V1Z"),
    ],
)
def test_histogram_outline(counts: tuple[int, ...], path: str) -> None:
    assert histogram_outline(counts) == path


def test_speed_bars_share_a_scale_that_begins_with_zero() -> None:
    point = SAMPLES["SLOWER"].speed[0]
    bars = speed_bars(point)

    assert [bar.name for bar in bars] == ["float, eager", "float, compiled", "int8"]
    longest = max(timing.high for timing in (point.float_eager, point.float_compiled, point.int8))
    for bar in bars:
        assert bar.width == pytest.approx(99 * bar.timing.median / longest)
        assert bar.half.start == pytest.approx(99 * bar.timing.low / longest)
        assert bar.half.end == pytest.approx(99 * bar.timing.high / longest)
        assert bar.half.start <= bar.width <= bar.half.end <= 100
