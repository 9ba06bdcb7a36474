"""A report as one page of HTML, which loads nothing."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jinja2

from versatil_core.latency import Judgement, Timing
from versatil_core.layer_report import ActivationRange, KernelRun, LayerReport
from versatil_core.number_text import (
    counted,
    decibel,
    duration,
    file_size,
    percent,
    shape_text,
    three_digits,
)
from versatil_core.report_charts import (
    EQUAL_Y,
    PLOT_BOTTOM,
    RangePicture,
    error_chart,
    range_picture,
    speed_bars,
    time_chart,
)
from versatil_core.report_gates import deciding_point
from versatil_core.report_result import Report, Size, VerdictCode
from versatil_core.report_tables import (
    JUDGEMENTS,
    LOW_USE,
    MUCH_CLIPPED,
    float_reasons,
    kernel_share_lines,
    unsteady_note,
    worst_ranges,
)

__all__ = ["render_html"]

TIMES, DASH, MINUS = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{MINUS SIGN}"

MANY_LAYERS = 24
"""Tables with more rows are closed at first."""
SHOWN_RANGES = 12
SHOWN_ERRORS = 10
LONG_SENTENCE = 150
"""A verdict with more letters is set in smaller ones."""
# Verdict -> the word above the sentence, a sign beside it, and whether it is good news.
_VERDICTS = {
    VerdictCode.INCOMPLETE: ("Incomplete", "…", "bad"),
    VerdictCode.INEXACT: ("Inexact", "≠", "bad"),
    VerdictCode.NO_INT8: ("No int8", "○", "bad"),
    VerdictCode.SLOWER: ("Slower", "▼", "bad"),
    VerdictCode.TOO_NOISY: ("Too noisy to tell", "?", "bad"),
    VerdictCode.SAME_SPEED: ("Same speed", "=", "good"),
    VerdictCode.FASTER: ("Faster", "▲", "good"),
    VerdictCode.NOT_TIMED: ("Not timed", DASH, "plain"),
}
_RATIO = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)x(?!\w)")
_BREAKS = re.compile(r"(?<=[.:/])(?=[^\W\d])")


@dataclass(frozen=True)
class TimeUnit:
    """In what the times of a column are shown, so that they can be compared at a glance."""

    name: str
    seconds: float
    digits: int

    def text(self, run: KernelRun | None) -> str:
        """Show the time of a kernel."""
        return DASH if run is None else f"{run.seconds / self.seconds:.{self.digits}f}"


@dataclass(frozen=True)
class Figure:
    """One of the few large numbers: what, how much, and compared with what."""

    label: str
    value: str
    remark: str


def render_html(report: Report) -> str:
    """Write a report as one page, with its pictures, that needs no network and no other file.

    Args:
        report: Whole or partial; what it doesn't have is left out.

    Returns:
        HTML. It has no script, and forbids itself to load anything.
    """
    word, sign, tone = _VERDICTS[report.verdict.code]
    unit = _time_unit(report.layers)
    template = _environment().get_template("report.html.jinja")
    return template.render(
        report=report,
        verdict={"word": word, "sign": sign, "tone": tone},
        figures=[*_figures(report)],
        reasons=float_reasons(report.layers),
        kernel_shares=kernel_share_lines(report),
        time_chart=time_chart(report.layers, unit.seconds),
        unit=unit,
        error_chart=error_chart(report.layers),
        worst_errors=_worst_errors(report.layers),
        ranges=_pictures(report.ranges),
        sizes=[] if report.size is None else [*_sizes(report.size)],
        speed_bars=speed_bars,
        unsteady=unsteady_note(report.speed),
        judgements={str(code): text for code, text in JUDGEMENTS.items()},
        low_use=LOW_USE,
        much_clipped=MUCH_CLIPPED,
        good_judgements={str(Judgement.FASTER), str(Judgement.SAME_SPEED)},
        many_layers=MANY_LAYERS,
        long_sentence=LONG_SENTENCE,
        equal_y=EQUAL_Y,
        bottom=PLOT_BOTTOM,
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("versatil_core", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "counted": counted,
        "decibel": decibel,
        "date": _date,
        "duration": lambda seconds: _typographic(duration(seconds)),
        "milliseconds": _milliseconds,
        "number": _number,
        "percent": percent,
        "pieces": _pieces,
        "place": _place,
        "ratio": _ratio,
        "shape": lambda shape: shape_text(shape).replace("x", TIMES),
        "typographic": _typographic,
    }
    return environment


def _figures(report: Report) -> Iterable[Figure]:
    point = deciding_point(report)
    if point is not None:
        least = f" (the least of {len(report.speed)})" if len(report.speed) > 1 else ""
        where = f"{counted(point.threads, 'thread')}, batch {point.batch}{least}"
        remark = f"against float compiled; {where}"
        yield Figure("Speed", _ratio(point.speedup.median), remark)
    size = report.size
    if size is not None and size.int8_file:
        sizes = f"{file_size(size.float_file)} → {file_size(size.int8_file)}"
        yield Figure("File", _smaller(size.float_file, size.int8_file), sizes)
    accuracy = report.accuracy
    if accuracy is not None:
        for metric in accuracy.metrics[:1]:
            yield Figure(
                metric.name, f"{metric.int8_value:.4g}", f"float: {metric.float_value:.4g}"
            )
        if accuracy.sqnr_db is not None:
            yield Figure("SQNR", decibel(accuracy.sqnr_db), "outputs, against float")
    total = len(report.layers)
    others = total - report.int8_count
    remark = f"{others} {'stays' if others == 1 else 'stay'} float" if others else "all"
    yield Figure("Layers in int8", f"{report.int8_count} of {total}", remark)


def _time_unit(layers: Iterable[LayerReport]) -> TimeUnit:
    """The one that suits the longest time."""
    runs = [run for layer in layers for run in (layer.float_run, layer.int8_run)]
    longest = max((run.seconds for run in runs if run is not None), default=0.0)
    name, seconds = ("ms", 1e-3) if longest >= 1e-3 else ("µs", 1e-6)
    digits = 3 if longest < 100 * seconds else 2 if longest < 1000 * seconds else 1
    return TimeUnit(name, seconds, digits)


def _worst_errors(layers: Iterable[LayerReport]) -> list[tuple[int, LayerReport]]:
    """The layers that introduce most error, with their numbers."""
    known = [
        (layer.accuracy.introduced_db, number, layer)
        for number, layer in enumerate(layers, start=1)
        if layer.accuracy is not None and layer.accuracy.introduced_db != float("inf")
    ]
    known.sort(key=lambda each: each[:2])
    return [(number, layer) for _, number, layer in known[:SHOWN_ERRORS]]


def _pictures(
    ranges: Iterable[ActivationRange],
) -> Mapping[str, list[tuple[ActivationRange, RangePicture]]]:
    """Those worth a look first, the others as the model runs."""
    ranges = [*ranges]
    worst = worst_ranges(ranges)[:SHOWN_RANGES]
    others = [each for each in ranges if each not in worst]
    return {
        "worst": [(each, range_picture(each)) for each in worst],
        "others": [(each, range_picture(each)) for each in others],
    }


def _sizes(size: Size) -> Iterable[tuple[str, str, str, str]]:
    rows = {
        "File": (size.float_file, size.int8_file),
        "Weights in memory": (size.float_weights, size.int8_weights),
        "Memory that a call takes": (size.float_call, size.int8_call),
        "Most memory of the process": (size.float_process, size.int8_process),
    }
    for name, (of_float, of_int8) in rows.items():
        if of_float is not None or of_int8 is not None:
            ratio = "" if of_float is None or of_int8 is None else _smaller(of_float, of_int8)
            first, second = (
                DASH if size is None else file_size(size) for size in (of_float, of_int8)
            )
            yield name, first, second, ratio


def _smaller(of_float: int, of_int8: int) -> str:
    if not of_float or not of_int8:
        return ""
    ratio = of_float / of_int8
    return f"{ratio:.1f}{TIMES} smaller" if ratio >= 1 else f"{1 / ratio:.1f}{TIMES} larger"


def _milliseconds(timing: Timing) -> str:
    return f"{three_digits(timing.median * 1e3)} ms"


def _place(percentage: float) -> str:
    """A length in SVG; two digits are a tenth of a pixel."""
    return f"{percentage:.2f}".rstrip("0").rstrip(".") + "%"


def _ratio(value: float) -> str:
    return f"{value:.2f}{TIMES}" if value >= 0.1 else f"{value:.1g}{TIMES}"


def _date(text: str) -> str:
    """Show a date in UTC as people write it."""
    return f"{text[:10]} {text[11:16]} UTC" if text.endswith("+00:00") else text


def _number(value: float, form: str = ".3g") -> str:
    return f"{value:{form}}".replace("-", MINUS)


def _typographic(text: str) -> str:
    """Write signs where a terminal has letters: ``2.00x`` and ``->`` and ``us``."""
    text = _RATIO.sub(rf"\1{TIMES}", text).replace(" -> ", " → ")
    return re.sub(r"(?<=\d) us\b", " µs", text)


def _pieces(name: str) -> list[str]:
    """Cut a long path where a line may end: after its dots."""
    return _BREAKS.split(name)
