"""The pictures of a report, as SVG that stands in the page.

Colours and line styles are those of the page's style sheet, by class, so that they follow light, dark
and print. Each picture has a title, which screen readers read and pointers show.
"""

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from versatil_core.layer_report import ActivationRange, LayerReport
from versatil_core.number_text import decibel, duration, percent
from versatil_core.report_result import SpeedPoint

__all__ = ["error_chart", "island_strip", "range_strip", "speed_bars", "time_bars"]

BAR_WIDTH = 200
STRIP_COLUMNS = 30
_SQUARE = 24
_DB_STEP = 20
_MIN_TOP_DB = 60


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """Make one element; ``_`` in the name of an attribute is ``-``, ``class_`` is ``class``.

    Example:
        >>> print(tag("rect", tag("title", "a < b"), class_="int8", stroke_width=2))
        <rect class="int8" stroke-width="2"><title>a &lt; b</title></rect>
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_rounded(value))}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{shown}>{''.join(map(escape, content))}</{name}>")  # noqa: S704 -- escaped


def error_chart(layers: Sequence[LayerReport]) -> Markup:
    """Draw what each layer adds to the error, and what has come together up to it, in running order.

    Args:
        layers: Those without a known error are left out.
    """
    known = [(layer, layer.accuracy) for layer in layers if layer.accuracy is not None]
    finite = [
        db
        for _, accuracy in known
        for db in (accuracy.introduced_db, accuracy.accumulated_db)
        if math.isfinite(db)
    ]
    top = max(_MIN_TOP_DB, _DB_STEP * math.ceil(max(finite, default=0) / _DB_STEP))
    left, height, step = 44, 220, max(7.0, 700 / max(len(known), 1))
    width = left + step * len(known) + 8

    def y(db: float) -> float:
        return 12 + (height - 12) * (1 - min(max(db, 0), top) / top)

    parts = [
        line
        for db in range(0, top + 1, _DB_STEP)
        for line in (
            tag("line", class_="grid", x1=left, x2=width, y1=y(db), y2=y(db)),
            tag("text", str(db), class_="tick", x=left - 8, y=y(db) + 4, text_anchor="end"),
        )
    ]
    for index, (layer, accuracy) in enumerate(known):
        x = left + step * (index + 0.5)
        added, together = accuracy.introduced_db, accuracy.accumulated_db
        title = tag(
            "title",
            f"{layer.name}: adds {decibel(added)}, up to there {decibel(together)}"
            f"{'' if layer.is_int8 else ' (float)'}",
        )
        parts.append(
            tag(
                "g",
                title,
                tag("line", class_="stem", x1=x, x2=x, y1=y(added), y2=y(together)),
                tag("circle", class_="added", cx=x, cy=y(added), r=4),
                tag("rect", class_="together", x=x - 3.5, y=y(together) - 3.5, width=7, height=7),
            )
        )
    axis = tag("text", "dB", class_="tick", x=left - 8, y=height + 24, text_anchor="end")
    order = tag("text", "layers in running order", class_="tick", x=left, y=height + 24)
    return _picture("Error per layer, in dB", width, height + 32, *parts, axis, order)


def time_bars(layer: LayerReport, longest: float) -> Markup:
    """Draw the time of a layer's kernel in the float model above that in the int8 model.

    Args:
        layer: What ran it.
        longest: Seconds that take the whole width.
    """
    bars = []
    for row, (kind, run) in enumerate((("float", layer.float_run), ("int8", layer.int8_run))):
        if run is not None:
            is_losing = kind == "int8" and (layer.speedup or 1) < 1
            width = max(1.0, BAR_WIDTH * run.seconds / longest)
            css = f"{kind} losing" if is_losing else kind
            bars.append(tag("rect", class_=css, x=0, y=9 * row, width=width, height=7))
    told = [
        f"{kind} {duration(run.seconds)}"
        for kind, run in (("float", layer.float_run), ("int8", layer.int8_run))
        if run is not None
    ]
    return _picture(f"{layer.name}: {', '.join(told)}", BAR_WIDTH, 16, *bars)


def speed_bars(point: SpeedPoint) -> Markup:
    """Draw the medians of one configuration, with the middle half of the samples as whiskers."""
    timings = (
        ("float eager", "float", point.float_eager),
        ("float compiled", "float", point.float_compiled),
        ("int8", "int8", point.int8),
    )
    longest = max(timing.high for *_, timing in timings)
    parts = []
    for row, (name, css, timing) in enumerate(timings):
        y, scale = 22 * row, 300 / longest
        low, median, high = (value * scale for value in (timing.low, timing.median, timing.high))
        parts += [
            tag("text", name, class_="tick", x=0, y=y + 13),
            tag("rect", class_=css, x=100, y=y + 2, width=median, height=14),
            tag("line", class_="whisker", x1=100 + low, x2=100 + high, y1=y + 9, y2=y + 9),
            tag("line", class_="whisker", x1=100 + low, x2=100 + low, y1=y + 5, y2=y + 13),
            tag("line", class_="whisker", x1=100 + high, x2=100 + high, y1=y + 5, y2=y + 13),
            tag("text", duration(timing.median), class_="value", x=106 + high, y=y + 13),
        ]
    return _picture(f"{point.threads} threads, batch {point.batch}", 480, 64, *parts)


def range_strip(found: ActivationRange) -> Markup:
    """Draw the values of an activation over its grid: histogram, percentiles, what is clipped."""
    low = min(found.grid_low, found.minimum)
    high = max(found.grid_high, found.maximum)
    width, height = 360, 44

    def x(value: float) -> float:
        return width * (value - low) / (high - low) if high > low else 0.0

    parts = [
        tag(
            "rect",
            class_="quantized",
            x=x(found.grid_low),
            y=0,
            height=height - 10,
            width=x(found.grid_high) - x(found.grid_low),
        ),
        *_histogram(found, x(found.minimum), x(found.maximum), height - 10),
    ]
    percentiles = found.percentiles
    if {"1", "50", "99"} <= percentiles.keys():
        parts += [
            tag(
                "line",
                class_="middle",
                x1=x(percentiles["1"]),
                x2=x(percentiles["99"]),
                y1=height - 5,
                y2=height - 5,
            ),
            tag(
                "line",
                class_="median",
                x1=x(percentiles["50"]),
                x2=x(percentiles["50"]),
                y1=height - 9,
                y2=height - 1,
            ),
        ]
    for from_value, to_value in (
        (found.minimum, found.grid_low),
        (found.grid_high, found.maximum),
    ):
        if to_value > from_value:
            parts.append(
                tag(
                    "line",
                    class_="clipped",
                    x1=x(from_value),
                    x2=x(to_value),
                    y1=height - 5,
                    y2=height - 5,
                )
            )
    title = (
        f"{', '.join(found.readers)}: grid {found.grid_low:.3g} to {found.grid_high:.3g}, values "
        f"{found.minimum:.3g} to {found.maximum:.3g}, {percent(found.clipped_share)} clipped"
    )
    return _picture(title, width, height, *parts)


def island_strip(layers: Sequence[LayerReport]) -> Markup:
    """Draw the layers in running order: filled ones run as int8, bridges are int8 between two."""
    parts = []
    for index, layer in enumerate(layers):
        x, y = _SQUARE * (index % STRIP_COLUMNS), _SQUARE * (index // STRIP_COLUMNS)
        css = "int8" if layer.is_int8 else "hollow"
        if layer.is_joined:
            parts.append(tag("rect", class_="bridge", x=x - 7, y=y + 9, width=12, height=6))
        kind = "int8" if layer.is_int8 else f"float, {layer.reason}"
        title = tag("title", f"{layer.name} ({layer.op}): {kind}")
        parts.append(tag("rect", title, class_=css, x=x + 4, y=y + 4, width=16, height=16, rx=2))
    rows = -(-len(layers) // STRIP_COLUMNS)
    columns = min(len(layers), STRIP_COLUMNS)
    count = sum(layer.is_int8 for layer in layers)
    title = f"{count} of {len(layers)} layers run as int8"
    return _picture(title, _SQUARE * max(columns, 1), _SQUARE * max(rows, 1), *parts)


def _histogram(
    found: ActivationRange, left: float, right: float, height: float
) -> Iterable[Markup]:
    most = max(found.histogram, default=0)
    if not most or right <= left:
        return
    step = (right - left) / len(found.histogram)
    for index, count in enumerate(found.histogram):
        if count:
            # The square root, so that the few far values are seen beside the many near zero.
            tall = height * math.sqrt(count / most)
            yield tag(
                "rect",
                class_="bin",
                x=left + step * index,
                y=height - tall,
                width=step,
                height=tall,
            )


def _picture(title: str, width: float, height: float, *parts: Markup) -> Markup:
    return tag(
        "svg",
        tag("title", title),
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
    )


def _rounded(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
