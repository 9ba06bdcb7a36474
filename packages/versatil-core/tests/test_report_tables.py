"""A report in a terminal: the verdict first, whole names, and nothing that was not measured."""

import io
import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from versatil_core.latency import Judgement
from versatil_core.number_text import duration
from versatil_core.report_result import MetricResult, Report, Timing, VerdictCode
from versatil_core.report_tables import (
    JUDGEMENTS,
    MANY,
    float_reasons,
    report_table,
    unsteady_note,
    worst_ranges,
)

SAMPLES: dict[str, Report]
SAMPLES = runpy.run_path(str(Path(__file__).with_name("report_samples.py")))["SAMPLES"]
FASTER = SAMPLES["faster"]


def shown(report: Report, width: int = 120) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(report_table(report))
    return stream.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def row(text: str, label: str) -> list[str]:
    """The words after the label in the one line that starts with it."""
    [line] = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    return line.removeprefix(label).split()


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    assert max(map(len, shown(SAMPLES[name], width).splitlines())) <= width


@pytest.mark.parametrize("name", SAMPLES)
def test_verdict_comes_first(name: str) -> None:
    report = SAMPLES[name]

    assert words(shown(report)).startswith(report.verdict.sentence)
    assert words(str(report)).startswith(report.verdict.sentence)


def test_gates() -> None:
    lines = words(shown(FASTER))

    assert "passed: speedup of at least 1.5x wanted: 1.70x (1.68 to 1.72)" in lines
    assert "failed: SQNR of at least 40 dB wanted: 31.4 dB" in lines
    assert "failed: all layers wanted as int8: 3 layers stay float" in lines


def test_numbers_are_those_of_the_report() -> None:
    text = shown(FASTER)

    assert row(text, "2, 8") == ["35.3", "ms", "25.2", "ms", "12.0", "ms", "2.10x", "faster"]
    assert "34.2 to 37.0 24.4 to 26.5 11.6 to 12.6 2.04 to 2.21" in words(text)
    assert row(text, "SQNR, int8 against float") == ["31.4", "dB"]
    assert row(text, "operations exact") == ["11", "of", "11"]
    assert row(text, "top1") == ["0.978", "->", "0.975", "(-0.003)"]
    assert row(text, "measured on") == ["48", "samples", "in", "6", "batches"]
    assert row(text, "file") == ["97.8", "MB", "25.1", "MB", "3.9x", "smaller"]
    assert row(text, "int8") == ["2.35", "s", "198", "ms", "8.12", "s", "10.8", "s"]
    assert "1 layer may saturate on this CPU, see <b>saturation</b> [sic]" in text
    assert "x86_inductor(is_dynamic=False, reduce_range=False, saturation='safe')" in words(text)


@pytest.mark.parametrize(
    ("missing", "heading"),
    [
        ({"speed": ()}, "Speed, each model in its turn"),
        ({"accuracy": None}, "Accuracy of the whole model"),
        ({"ranges": ()}, "Ranges worth a look"),
        ({"size": None}, "weights in memory"),
        ({"first_result": {}}, "First result of a new process"),
        ({"notes": ()}, "Notes"),
        ({"gates": ()}, "passed: "),
    ],
)
def test_what_was_not_measured_is_left_out(missing: dict[str, Any], heading: str) -> None:
    assert heading in shown(FASTER)
    assert heading not in shown(replace(FASTER, **missing))


@pytest.mark.parametrize("width", [80, 120])
def test_names_are_whole_and_no_markup(width: int) -> None:
    layer = replace(FASTER.layers[2], module_path="a.[bold].:x:")
    accuracy = FASTER.accuracy
    assert accuracy is not None
    metric = MetricResult("[red]top1", 0.5, 0.25)
    report = replace(
        FASTER,
        layers=(layer, replace(FASTER.layers[0], module_path="b.[dim]")),
        accuracy=replace(accuracy, metrics=(metric,)),
        notes=("[italic]",),
    )
    text = "".join(shown(report, width).split())

    assert text.count("a.[bold].:x:") == 2  # its error, its kernel
    for name in ("b.[dim]", "[red]top1", "[italic]"):
        assert name in text


def test_a_layer_with_its_kernel_and_times() -> None:
    layer = FASTER.layers[3]
    assert layer.int8_run is not None
    assert layer.float_run is not None
    text = words(shown(replace(FASTER, layers=(layer,), accuracy=None), 160))

    assert layer.name in text
    assert "8x128x384" in text
    assert "linear + add + relu" in text
    assert duration(layer.float_run.seconds) in text
    assert duration(layer.int8_run.seconds) in text
    assert f"{layer.speedup:.2f}x" in text
    assert layer.int8_run.implementation in text


def test_layers_with_one_reason_share_a_line() -> None:
    text = words(shown(FASTER))

    assert "embeddings.word_embeddings and 1 more (embedding) stays float: no int8 kernel" in text
    assert "pooler.dense (linear) stays float: its module was excluded" in text
    groups = [(reason, len(found)) for reason, found in float_reasons(FASTER.layers)]
    assert groups == [
        ("no int8 kernel for embedding", 2),
        ("its module was excluded: quantize it, too", 1),
    ]


def test_the_layers_that_add_most_error_come_first() -> None:
    text = shown(replace(SAMPLES["many"], ranges=(), speed=(), size=None))
    section = text.partition("Layers that add the most error")[2].partition("layers int8")[0]
    found = [float(line.split()[2]) for line in section.splitlines() if " dB " in line]

    known = [layer.accuracy.introduced_db for layer in SAMPLES["many"].layers if layer.accuracy]
    assert found == pytest.approx(sorted(known)[:MANY], abs=0.05)


def test_inexact_layers_are_shown() -> None:
    text = words(shown(SAMPLES["inexact"]))

    assert "nothing in common" in text
    assert "up to 26 steps, in 3 %" in text


def test_ranges_worth_a_look() -> None:
    inside, clipped, unused, outliers, used = FASTER.ranges

    assert worst_ranges(FASTER.ranges)[0] is unused
    assert {each.node for each in worst_ranges(FASTER.ranges)} == {
        each.node for each in (clipped, unused, outliers)
    }
    assert worst_ranges([inside, used]) == []
    assert "2 of 384" in shown(FASTER)


def test_a_busy_machine_is_named() -> None:
    point = FASTER.speed[0]
    assert unsteady_note([point]) == ""

    busy = replace(point, int8=Timing(1.0, 0.8, 1.2))
    assert "The machine was busy" in unsteady_note([point, busy])
    assert "The machine was busy" in shown(replace(FASTER, speed=(busy,)))


def test_every_judgement_has_words() -> None:
    assert JUDGEMENTS.keys() == {*Judgement}
    assert {report.verdict.code for report in SAMPLES.values()} >= {
        VerdictCode.FASTER,
        VerdictCode.SLOWER,
        VerdictCode.INEXACT,
        VerdictCode.INCOMPLETE,
        VerdictCode.NOT_TIMED,
    }
    slower = shown(SAMPLES["slower"])
    for judgement in ("slower", "too noisy to tell", "as fast"):
        assert judgement in slower


def test_equal_outputs() -> None:
    accuracy = FASTER.accuracy
    assert accuracy is not None
    text = shown(replace(FASTER, accuracy=replace(accuracy, kernels_sqnr_db=math.inf)))

    assert row(text, "SQNR, int8 against reference") == ["equal"]


def test_of_many_layers_the_slowest_are_shown() -> None:
    text = shown(SAMPLES["many"], 300)
    timed = [layer for layer in SAMPLES["many"].layers if layer.int8_run is not None]
    slowest = max(timed, key=lambda layer: layer.int8_run.seconds)  # type: ignore[union-attr]

    assert slowest.name in "".join(text.split())
    hidden = SAMPLES["many"].int8_count - 40
    assert f"and {hidden} faster layers; a page shows all" in text
