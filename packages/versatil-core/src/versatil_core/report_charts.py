"""Where the marks of a report's pictures lie.

Across, positions are percent of a picture's width, so that it fits a phone as well as a sheet of
paper without scaling its text; down, they are pixels. The template draws them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from versatil_core.latency import Timing
from versatil_core.layer_report import ActivationRange, LayerReport
from versatil_core.report_result import SpeedPoint

__all__ = [
    "EQUAL_Y",
    "PLOT_BOTTOM",
    "PLOT_TOP",
    "LayerChart",
    "LayerRow",
    "Mark",
    "RangePicture",
    "Span",
    "SpeedBar",
    "Tick",
    "error_chart",
    "histogram_outline",
    "range_picture",
    "round_ticks",
    "speed_bars",
    "time_chart",
]

PLOT_TOP, PLOT_BOTTOM = 26.0, 150.0
"""Between them lie all values; above is room for marks, below for the numbers of layers."""
EQUAL_Y = 8.0
"""Where a layer without any error is drawn: it has no dB."""
LAYERS_PER_ROW = 60
LAYER_WIDTH = 44
"""Pixels for one layer, at most: three of them shall not fill a page."""
_ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)

Pair = tuple[float | None, float | None]


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    """One layer's two values in a picture.

    Attributes:
        number: Of the layer, from 1.
        layer: The layer.
        x: Its middle, in percent of the row.
        ys: Pixels from the top; None where there is no value.
    """

    number: int
    layer: LayerReport
    x: float
    ys: Pair


@dataclass(frozen=True)
class LayerRow:
    """Some layers after each other; a long model has several rows.

    Attributes:
        marks: One for each layer.
        step: Width of a layer, in percent of the row.
        numbers: Below the row: which layer is which.
        max_width: In pixels.
    """

    marks: tuple[Mark, ...]
    step: float
    numbers: tuple[Tick, ...]
    max_width: int


@dataclass(frozen=True)
class LayerChart:
    """Two values of every layer, over all layers in running order.

    Attributes:
        rows: The layers.
        ticks: Of the values, the same in each row; ``at`` is pixels from the top.
        has_equal: Whether layers without any error are in it.
    """

    rows: tuple[LayerRow, ...]
    ticks: tuple[Tick, ...]
    has_equal: bool = False


@dataclass(frozen=True)
class Span:
    """From ``start``, so wide; both in percent."""

    start: float
    width: float

    @property
    def end(self) -> float:
        """Where it ends, in percent."""
        return self.start + self.width


@dataclass(frozen=True)
class RangePicture:
    """One activation: what it takes, over what its grid holds.

    Attributes:
        grid: What the grid holds.
        seen: From the smallest to the largest value.
        middle: From the 1st to the 99th percentile.
        median: The 50th.
        zero: Where 0 lies; None outside the picture.
        clipped: The parts of `seen` outside the grid.
        histogram: An outline in a box as wide as there are bins and 1 high; empty without bars.
        bins: How many there are.
        bars: Where that box lies; it may reach beyond the picture, which cuts it.
        is_cut: Whether values lie so far out that the picture leaves them out: below, above.
    """

    grid: Span
    seen: Span
    middle: Span
    median: float
    zero: float | None
    clipped: tuple[Span, ...]
    histogram: str
    bins: int
    bars: Span
    is_cut: tuple[bool, bool]


@dataclass(frozen=True)
class SpeedBar:
    """One model in one configuration: a bar, and over its end the middle half of the samples."""

    name: str
    timing: Timing
    width: float
    half: Span


def error_chart(layers: Sequence[LayerReport]) -> LayerChart | None:
    """Show what each layer adds to the error, and what has come together; None without any."""
    pairs: list[Pair] = [
        (None, None)
        if layer.accuracy is None
        else (layer.accuracy.introduced_db, layer.accuracy.accumulated_db)
        for layer in layers
    ]
    values = _values(pairs)
    if not values:
        return None
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    ticks = round_ticks(min(finite), max(finite))

    def y(value: float | None) -> float | None:
        if value is None or math.isnan(value):
            return None
        return EQUAL_Y if value == math.inf else _y(max(value, ticks[0]), ticks)

    rows = _rows(layers, [(y(first), y(second)) for first, second in pairs])
    return LayerChart(rows, _value_ticks(ticks), has_equal=math.inf in values)


def time_chart(layers: Sequence[LayerReport], unit_seconds: float) -> LayerChart | None:
    """Show how long the kernel of each layer takes, float and int8; None if none was seen.

    Args:
        layers: In running order.
        unit_seconds: What 1 on the axis is.
    """

    def units(layer: LayerReport) -> Pair:
        runs = layer.float_run, layer.int8_run
        first, second = (None if run is None else run.seconds / unit_seconds for run in runs)
        return first, second

    pairs = [units(layer) for layer in layers]
    values = _values(pairs)
    if not values:
        return None
    ticks = round_ticks(0.0, max(values))

    def y(value: float | None) -> float | None:
        return None if value is None else _y(value, ticks)

    rows = _rows(layers, [(y(first), y(second)) for first, second in pairs])
    return LayerChart(rows, _value_ticks(ticks))


def range_picture(found: ActivationRange) -> RangePicture:
    """Lay one activation out over its grid, and at most one width of the grid beyond either end."""
    low, high = found.grid_low, found.grid_high
    width = high - low or 1.0
    left = max(min(found.minimum, low), low - width)
    right = min(max(found.maximum, high), high + width)
    scale = 100 / (right - left or 1.0)

    def at(value: float) -> float:
        return (min(max(value, left), right) - left) * scale

    def span(start: float, end: float) -> Span:
        return Span(at(start), max(0.0, at(end) - at(start)))

    seen = found.maximum - found.minimum
    has_bars = math.isfinite(seen) and seen > 0
    outside = (
        span(found.minimum, min(low, found.maximum)),
        span(max(high, found.minimum), found.maximum),
    )
    return RangePicture(
        grid=span(low, high),
        seen=span(found.minimum, found.maximum),
        middle=span(found.percentiles["1"], found.percentiles["99"]),
        median=at(found.percentiles["50"]),
        zero=at(0.0) if left <= 0 <= right else None,
        clipped=tuple(part for part in outside if part.width > 0),
        histogram=histogram_outline(found.histogram) if has_bars else "",
        bins=len(found.histogram),
        bars=Span((found.minimum - left) * scale, seen * scale) if has_bars else Span(0, 0),
        is_cut=(found.minimum < left, found.maximum > right),
    )


def histogram_outline(counts: Sequence[int]) -> str:
    """Draw bars as an SVG path, each 1 wide; the highest is 1 high, heights go by square roots.

    Example:
        >>> histogram_outline([1, 4])
        'M0 1V.5H1V0H2V1Z'
    """
    most = math.sqrt(max(counts, default=0)) or 1.0
    tops = (1 - math.sqrt(count) / most for count in counts)
    steps = (f"V{_short(top)}H{end}" for end, top in enumerate(tops, start=1))
    return f"M0 1{''.join(steps)}V1Z"


def speed_bars(point: SpeedPoint) -> tuple[SpeedBar, ...]:
    """Lay the three models of a configuration out, on a scale that begins with 0."""
    models = {
        "float, eager": point.float_eager,
        "float, compiled": point.float_compiled,
        "int8": point.int8,
    }
    # A little room, so that the end of the longest line shows.
    scale = 99 / (max(timing.high for timing in models.values()) or 1.0)
    return tuple(
        SpeedBar(
            name,
            timing,
            scale * timing.median,
            Span(scale * timing.low, scale * (timing.high - timing.low)),
        )
        for name, timing in models.items()
    )


def round_ticks(low: float, high: float, count: int = 4) -> tuple[float, ...]:
    """Return about so many round numbers in equal steps, the first <= low, the last >= high.

    Example:
        >>> round_ticks(18.2, 61.0)
        (0.0, 20.0, 40.0, 60.0, 80.0)
    """
    wanted = (high - low or abs(high) or 1.0) / count
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(factor * power for factor in _ROUND_STEPS if factor * power >= wanted * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(index * step for index in range(first, max(last, first + 1) + 1))


def _values(pairs: Iterable[Pair]) -> list[float]:
    return [value for pair in pairs for value in pair if value is not None]


def _rows(layers: Sequence[LayerReport], ys: Iterable[Pair]) -> tuple[LayerRow, ...]:
    """Share the layers out evenly over as many rows as they need."""
    size = math.ceil(len(layers) / math.ceil(len(layers) / LAYERS_PER_ROW))
    step = 100 / size
    marks = [
        Mark(index + 1, layer, (index % size + 0.5) * step, pair)
        for index, (layer, pair) in enumerate(zip(layers, ys, strict=True))
    ]
    rows = [marks[start : start + size] for start in range(0, len(marks), size)]
    return tuple(
        LayerRow(tuple(row), step, _numbers(row, size), size * LAYER_WIDTH) for row in rows
    )


def _numbers(row: Sequence[Mark], size: int) -> tuple[Tick, ...]:
    """Every number where there is room, else every fifth, and always the first."""
    every = 1 if size <= 20 else 5
    return tuple(
        Tick(mark.x, str(mark.number))
        for mark in row
        if mark.number % every == 0 or (mark is row[0] and (mark.number + 1) % every)
    )


def _y(value: float, ticks: Sequence[float]) -> float:
    share = (value - ticks[0]) / (ticks[-1] - ticks[0])
    return PLOT_BOTTOM - share * (PLOT_BOTTOM - PLOT_TOP)


def _value_ticks(ticks: Sequence[float]) -> tuple[Tick, ...]:
    return tuple(Tick(_y(value, ticks), f"{value:g}") for value in ticks)


def _short(value: float) -> str:
    """With two digits, and without what SVG doesn't need: a page has thousands of them."""
    return f"{value:.2f}".rstrip("0").rstrip(".").removeprefix("0") or "0"
