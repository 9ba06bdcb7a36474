"""The verdict and the conditions, from reports made by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from versatil_core import TargetError, VerdictCode
from versatil_core.latency import Judgement
from versatil_core.layer_report import KernelRun, LayerReport
from versatil_core.report_gates import deciding_point, gates_of, verdict_of
from versatil_core.report_result import (
    Accuracy,
    MetricResult,
    Report,
    Size,
    SpeedPoint,
    Timing,
)


def point(judgement: Judgement, speedup: float, *, threads: int = 2, batch: int = 8) -> SpeedPoint:
    timing = Timing(1.0, 1.0, 1.0)
    ratio = Timing(speedup, speedup - 0.1, speedup + 0.1)
    shapes = ((batch, 3),)
    interval = (speedup - 0.05, speedup + 0.05)
    timings = (timing, timing, timing, ratio, ratio)
    return SpeedPoint(threads, batch, shapes, 30, *timings, interval, judgement)


FASTER = point(Judgement.FASTER, 2.0)
SLOWER = point(Judgement.SLOWER, 0.8, batch=1)
NOISY = point(Judgement.TOO_NOISY, 1.2)
SAME = point(Judgement.SAME_SPEED, 1.01)
ACCURACY = Accuracy(2, 16, 2, 30.0, 30.1, 70.0, 0.999, 0.1, 9, 9)
INEXACT = replace(ACCURACY, exact_ops=7)
EMPTY: Any = None


def layer(name: str, float_seconds: float, int8_seconds: float | None) -> LayerReport:
    """An int8 layer, or without ``int8_seconds`` a float one."""

    def run(seconds: float) -> KernelRun:
        return KernelRun("onednn", "some:kernel", "matmul", "u8:s8:f32", seconds)

    is_int8 = int8_seconds is not None
    return LayerReport(
        module_path=name,
        op="linear",
        node=name,
        input_shape=(8, 3),
        weight_shape=(4, 3),
        output_shape=(8, 4),
        is_int8=is_int8,
        post_ops=(),
        output_dtype="float32" if is_int8 else None,
        reason=None if is_int8 else "not asked for",
        int8_run=None if int8_seconds is None else run(int8_seconds),
        float_run=run(float_seconds),
    )


LAYERS = (
    layer("encoder.0", 1.0, 2.0),
    layer("encoder.1", 1.0, 5.0),
    layer("encoder.2", 2.0, 1.0),
    layer("head", 1.0, None),
)


def report(**values: Any) -> Report:
    return replace(Report("toy", EMPTY, EMPTY, LAYERS), **values)


@pytest.mark.parametrize(
    ("values", "code", "sentence"),
    [
        ({}, VerdictCode.NOT_TIMED, "3 of 4 layers int8."),
        (
            {"speed": (FASTER,), "accuracy": ACCURACY, "size": Size(400, 100, 0, 0)},
            VerdictCode.FASTER,
            (
                "2.00x faster than float torch.compile on this CPU (2 threads, batch 8), 4.0x smaller, "
                "SQNR 30.0 dB, 3 of 4 layers int8."
            ),
        ),
        (
            # The configuration that gains least speaks for all.
            {"speed": (FASTER, SLOWER)},
            VerdictCode.SLOWER,
            (
                "0.80x, slower than float torch.compile on this CPU (2 threads, batch 1), "
                "layers that lose: encoder.1, encoder.0, 3 of 4 layers int8."
            ),
        ),
        (
            {"speed": (FASTER, NOISY)},
            VerdictCode.TOO_NOISY,
            (
                "Too noisy to tell whether it is faster than float torch.compile on this CPU (2 threads, "
                "batch 8): 1.20x, 1.10 to 1.30, 3 of 4 layers int8."
            ),
        ),
        (
            {"size": Size(102, 100, 0, 0)},
            VerdictCode.NOT_TIMED,
            "3 of 4 layers int8.",
        ),
        (
            # Each kernel is faster, and most of a call is elsewhere.
            {"speed": (SLOWER,), "layers": (layer("encoder", 0.4, 0.2),)},
            VerdictCode.SLOWER,
            (
                "0.80x, slower than float torch.compile on this CPU (2 threads, batch 1), "
                "of a call only 20.0 % is in the kernels of its layers, 1 of 1 layers int8."
            ),
        ),
        (
            {"speed": (FASTER, SAME)},
            VerdictCode.SAME_SPEED,
            "As fast as float torch.compile on this CPU (2 threads, batch 8), 3 of 4 layers int8.",
        ),
        (
            {"speed": (FASTER,), "accuracy": INEXACT},
            VerdictCode.INEXACT,
            (
                "The int8 kernels do not give what the reference defines (7 of 9 operations are exact), "
                "2.00x faster than float torch.compile on this CPU (2 threads, batch 8), SQNR 30.0 dB, "
                "3 of 4 layers int8."
            ),
        ),
        (
            {"speed": (FASTER,), "layers": LAYERS[3:]},
            VerdictCode.NO_INT8,
            "2.00x faster than float torch.compile on this CPU (2 threads, batch 8), 0 of 1 layers int8.",
        ),
        (
            {"accuracy": INEXACT, "unfinished": ("speed",)},
            VerdictCode.INCOMPLETE,
            (
                "Stopped before it was done with speed, the int8 kernels do not give what the reference "
                "defines (7 of 9 operations are exact), SQNR 30.0 dB, 3 of 4 layers int8."
            ),
        ),
        (
            {"accuracy": replace(ACCURACY, metrics=(MetricResult("top1", 0.978, 0.97512),))},
            VerdictCode.NOT_TIMED,
            "Top1 0.978 -> 0.9751, SQNR 30.0 dB, 3 of 4 layers int8.",
        ),
    ],
)
def test_verdict(values: dict[str, Any], code: VerdictCode, sentence: str) -> None:
    verdict = verdict_of(report(**values))

    assert (verdict.code, verdict.sentence) == (code, sentence)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"reference_sqnr_db": 30.25, "kernels_sqnr_db": 30.0}, ""),
        (
            {"reference_sqnr_db": 30.4, "kernels_sqnr_db": 30.0},
            "(they are 0.4 dB farther from float, 0.3 are allowed)",
        ),
        ({"are_inputs_untouched": False}, "(an input was overwritten)"),
        ({"sqnr_db": math.inf, "reference_sqnr_db": math.inf}, ""),
        ({"sqnr_db": math.inf}, ""),
        # As near to the reference as another order of summation: no loss, however near that is.
        ({"reference_sqnr_db": math.inf}, ""),
        ({"reference_sqnr_db": math.inf, "kernels_sqnr_db": 30.0}, "(they are inf dB farther"),
        # Infinities in other places than the reference's.
        (
            {"sqnr_db": -math.inf, "reference_sqnr_db": -math.inf, "kernels_sqnr_db": -math.inf},
            "(their results have nothing in common with the reference's)",
        ),
        # Integers only.
        ({"sqnr_db": None, "reference_sqnr_db": None, "kernels_sqnr_db": None}, ""),
    ],
)
def test_what_is_not_exact_says_why(values: dict[str, Any], fault: str) -> None:
    verdict = verdict_of(report(accuracy=replace(ACCURACY, **values)))

    assert fault in verdict.sentence
    assert (verdict.code is VerdictCode.INEXACT) == bool(fault)


def test_deciding_point() -> None:
    """The worst judgement, and not the lowest ratio: word and sentence speak of one configuration."""
    nearly = point(Judgement.TOO_NOISY, 0.7)
    assert deciding_point(report()) is None
    assert deciding_point(report(speed=(FASTER, SLOWER, nearly))) is SLOWER
    assert deciding_point(report(speed=(SAME, nearly, NOISY))) is nearly
    assert deciding_point(report(speed=(FASTER, SAME))) is SAME


def test_share_of_the_kernels() -> None:
    found = report(speed=(FASTER,), layers=(layer("a", 0.5, 0.125), layer("b", 0.25, None)))

    assert found.float_kernel_share == 0.75
    assert found.int8_kernel_share == 0.125
    assert report(speed=(FASTER,), layers=LAYERS[3:]).int8_kernel_share is None
    assert report().float_kernel_share is None


def test_losing_layers_come_worst_first() -> None:
    assert [each.name for each in report().losing_layers] == ["encoder.1", "encoder.0"]


@pytest.mark.parametrize(
    ("conditions", "passed", "text"),
    [
        ({"min_speedup": 1.9}, True, "speedup of at least 1.9x wanted: 2.00x (1.95 to 2.05) with"),
        ({"min_speedup": 2.1}, False, "speedup of at least 2.1x wanted: 2.00x (1.95 to 2.05)"),
        ({"min_sqnr_db": 30}, True, "SQNR of at least 30 dB wanted: 30.0 dB"),
        ({"min_sqnr_db": 30.5}, False, "SQNR of at least 30.5 dB wanted: 30.0 dB"),
        ({"require_int8": True}, False, "all layers wanted as int8: 1 layer stays float: head"),
        ({"require_int8": True, "excluded": ["head"]}, True, "all layers wanted as int8: all are"),
    ],
)
def test_gates(conditions: dict[str, Any], passed: bool, text: str) -> None:
    [gate] = gates_of(report(speed=(FASTER,), accuracy=ACCURACY), **conditions)

    assert gate.is_passed is passed
    assert gate.text.startswith(text)


def test_no_condition_is_no_gate() -> None:
    assert gates_of(report(speed=(FASTER,))) == ()


@pytest.mark.parametrize("conditions", [{"min_speedup": 0.1}, {"min_sqnr_db": 0.0}])
def test_what_was_not_measured_does_not_pass(conditions: dict[str, Any]) -> None:
    [gate] = gates_of(report(), **conditions)

    assert not gate.is_passed
    assert "not measured" in gate.text


def test_each_configuration_has_to_be_fast() -> None:
    [gate] = gates_of(report(speed=(FASTER, SLOWER)), min_speedup=1.0)

    assert not gate.is_passed
    assert "0.80x (0.75 to 0.85) with 2 threads, batch 1" in gate.text


@pytest.mark.parametrize(("limit", "passed"), [(1.94, True), (1.96, False), (0.5, True)])
def test_the_interval_has_to_be_beyond_the_limit(limit: float, passed: bool) -> None:
    [gate] = gates_of(report(speed=(FASTER,)), min_speedup=limit)
    assert gate.is_passed is passed


def test_an_excluded_path_must_exist() -> None:
    with pytest.raises(TargetError, match=r"--exclude haed: no layer .*did you mean 'head'"):
        gates_of(report(), require_int8=True, excluded=["haed"])
