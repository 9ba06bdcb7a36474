"""Turns the numbers of a report into a verdict, and into conditions that hold or not."""

import math
from collections.abc import Iterable, Iterator

from versatil_core.exactness_report import MAX_END_TO_END_LOSS_DB
from versatil_core.excluded_layers import float_layers_outside
from versatil_core.latency import Judgement
from versatil_core.number_text import counted, decibel, percent
from versatil_core.report_result import (
    Accuracy,
    Gate,
    Report,
    Size,
    SpeedPoint,
    Verdict,
    VerdictCode,
)

_SHOWN_LAYERS = 3
_WORST_FIRST = (
    Judgement.SLOWER,
    Judgement.TOO_NOISY,
    Judgement.SAME_SPEED,
    Judgement.FASTER,
)
MUCH_SMALLER = 1.05
SMALL_SHARE = 0.5
"""Where kernels take less of a call, making them faster hardly helps."""


def verdict_of(report: Report) -> Verdict:
    """Sum a report up in one code and one sentence.

    Args:
        report: Its own verdict is not looked at.
    """
    sentence = ", ".join(_phrases(report))
    return Verdict(_code(report), f"{sentence[:1].upper()}{sentence[1:]}.")


def deciding_point(report: Report) -> SpeedPoint | None:
    """The configuration that makes the verdict on speed; None if speed was not measured.

    That with the worst judgement; of several, the one in which int8 gains least.
    """
    return min(
        report.speed,
        key=lambda point: (_WORST_FIRST.index(point.judgement), point.speedup.median),
        default=None,
    )


def gates_of(
    report: Report,
    *,
    min_speedup: float | None = None,
    min_sqnr_db: float | None = None,
    require_int8: bool = False,
    excluded: Iterable[str] = (),
) -> tuple[Gate, ...]:
    """Check the conditions that were asked for.

    Args:
        report: A whole one.
        min_speedup: Times that int8 has to be faster than the compiled float model, in every
            configuration: the confidence interval of the ratio has to be at least there.
        min_sqnr_db: SQNR that the outputs must have against the float model, in dB.
        require_int8: Whether every layer has to run as int8.
        excluded: Module paths that may stay float, with all in them.

    Raises:
        TargetError: An excluded path matches no layer.
    """
    return tuple(_gates(report, min_speedup, min_sqnr_db, require_int8, tuple(excluded)))


def _code(report: Report) -> VerdictCode:
    if report.is_partial:
        return VerdictCode.INCOMPLETE
    if report.accuracy is not None and not report.accuracy.is_exact:
        return VerdictCode.INEXACT
    if not report.int8_count:
        return VerdictCode.NO_INT8
    point = deciding_point(report)
    return VerdictCode.NOT_TIMED if point is None else VerdictCode(point.judgement)


def _phrases(report: Report) -> Iterator[str]:
    if report.is_partial:
        yield f"stopped before it was done with {' and '.join(report.unfinished)}"
    accuracy = report.accuracy
    if accuracy is not None and not accuracy.is_exact:
        yield f"the int8 kernels do not give what the reference defines ({_fault(accuracy)})"
    if (point := deciding_point(report)) is not None:
        yield _speed_phrase(point)
        if point.judgement is Judgement.SLOWER and report.losing_layers:
            yield _losing_phrase(report)
        share = report.int8_kernel_share
        if point.judgement is Judgement.SLOWER and share is not None and share < SMALL_SHARE:
            yield f"of a call only {percent(share)} is in the kernels of its layers"
    if report.size is not None and (ratio := _times_smaller(report.size)) >= MUCH_SMALLER:
        yield f"{ratio:.1f}x smaller"
    if accuracy is not None:
        yield from (
            f"{metric.name} {metric.float_value:.4g} -> {metric.int8_value:.4g}"
            for metric in accuracy.metrics
        )
        if accuracy.sqnr_db is not None:
            yield (
                f"SQNR {decibel(accuracy.sqnr_db)}"
                if accuracy.sqnr_db > -math.inf
                else "outputs with nothing in common with float's"
            )
        if accuracy.equal_share is not None:
            yield f"{percent(accuracy.equal_share)} of the integers equal"
    yield f"{report.int8_count} of {len(report.layers)} layers int8"


def _fault(accuracy: Accuracy) -> str:
    if accuracy.exact_ops < accuracy.ops:
        return f"{accuracy.exact_ops} of {accuracy.ops} operations are exact"
    if not accuracy.are_inputs_untouched:
        return "an input was overwritten"
    if accuracy.loss_db is None:
        return "their results have nothing in common with the reference's"
    return f"they are {accuracy.loss_db:.1f} dB farther from float, {MAX_END_TO_END_LOSS_DB} are allowed"


def _times_smaller(size: Size) -> float:
    return size.float_file / size.int8_file


def _speed_phrase(point: SpeedPoint) -> str:
    threads = counted(point.threads, "thread")
    where = f"than float torch.compile on this CPU ({threads}, batch {point.batch})"
    ratio = point.speedup.median
    if point.judgement is Judgement.FASTER:
        return f"{ratio:.2f}x faster {where}"
    if point.judgement is Judgement.SLOWER:
        return f"{ratio:.2f}x, slower {where}"
    if point.judgement is Judgement.SAME_SPEED:
        return f"as fast as float torch.compile on this CPU ({threads}, batch {point.batch})"
    return f"too noisy to tell whether it is faster {where}: {ratio:.2f}x, {point.speedup.low:.2f} to {point.speedup.high:.2f}"


def _losing_phrase(report: Report) -> str:
    losing = report.losing_layers
    names = ", ".join(layer.name for layer in losing[:_SHOWN_LAYERS])
    more = len(losing) - _SHOWN_LAYERS
    return f"layers that lose: {names}{f' and {more} more' if more > 0 else ''}"


def _gates(
    report: Report,
    min_speedup: float | None,
    min_sqnr_db: float | None,
    require_int8: bool,
    excluded: tuple[str, ...],
) -> Iterator[Gate]:
    if min_speedup is not None:
        worst = min(report.speed, key=lambda point: point.speedup_interval[0], default=None)
        found = "not measured" if worst is None else _interval_phrase(worst)
        yield Gate(
            "min_speedup",
            worst is not None and worst.speedup_interval[0] >= min_speedup,
            f"speedup of at least {min_speedup:g}x wanted: {found}",
        )
    if min_sqnr_db is not None:
        measured = None if report.accuracy is None else report.accuracy.sqnr_db
        is_passed = measured is not None and measured >= min_sqnr_db
        found = "not measured" if measured is None else decibel(measured)
        yield Gate("min_sqnr", is_passed, f"SQNR of at least {min_sqnr_db:g} dB wanted: {found}")
    if require_int8:
        float_layers = float_layers_outside(report.layers, excluded)
        names = ", ".join(layer.name for layer in float_layers)
        count = len(float_layers)
        subject = "1 layer stays" if count == 1 else f"{count} layers stay"
        found = f"{subject} float: {names}" if float_layers else "all are"
        yield Gate("require_int8", not float_layers, f"all layers wanted as int8: {found}")


def _interval_phrase(point: SpeedPoint) -> str:
    low, high = point.speedup_interval
    threads = counted(point.threads, "thread")
    ratio = point.speedup.median
    return f"{ratio:.2f}x ({low:.2f} to {high:.2f}) with {threads}, batch {point.batch}"
