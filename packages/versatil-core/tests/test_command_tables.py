"""The tables fit a terminal of 80 columns and say what was measured, also when int8 loses."""

import dataclasses
import io

import pytest
from rich.console import Console, RenderableType

from versatil_core.command_tables import (
    UNSTEADY,
    backends_table,
    demo_report,
    doctor_report,
)
from versatil_core.demo_result import DeclinedLayer, DemoResult
from versatil_core.discovery import BackendEntry
from versatil_core.doctor import BackendHealth, Diagnosis, Finding, Int8Plan
from versatil_core.host import Host
from versatil_core.latency import Timing

HOST = Host("Some CPU", "x86_64", 2, ("avx2",))
RESULT = DemoResult(
    title="a CNN reads digits",
    held_out="160 unseen sentences",
    float_accuracy=0.995,
    int8_accuracy=0.985,
    same_answers=0.9,
    sqnr_float=30.04,
    sqnr_reference=70.0,
    exact_ops=9,
    ops=10,
    float_latency=Timing(0.1234, 0.12, 0.13),
    int8_latency=Timing(0.004, 0.0039, 0.0041),
    speedup=2.0,
    rounds=40,
    batch=((64, 1, 16, 16),),
    threads=2,
    float_bytes=2_400_000,
    int8_bytes=800_000,
    int8_layers=7,
    layers=10,
    declined=(
        DeclinedLayer("encoder.0", "sdpa", "no kernel"),
        DeclinedLayer("encoder.1", "sdpa", "no kernel"),
        DeclinedLayer("head", "linear", "weight is [no] constant"),
    ),
    backend="X86InductorBackend(is_dynamic=False)",
    host=HOST,
    versions={"torch": "2.13.0"},
)
DIAGNOSIS = Diagnosis(
    host=HOST,
    python="3.11.7",
    versions={"torch": "2.13.0"},
    compiler=None,
    backends=(
        BackendHealth("good", "good-package", "1.0", None),
        BackendHealth("bad", "bad-package", "2.0", "bad cannot be imported [sic]"),
    ),
    int8=Int8Plan(
        backend="good",
        options={"is_dynamic": False},
        reasons={"is_dynamic": "the [CPU] likes it"},
        ops=("linear",),
        activations=("uint8",),
        weights=("per_channel",),
        post_ops=(),
    ),
    findings=(
        Finding("problem", "bad cannot be imported [sic]"),
        Finding("risk", "saturates"),
    ),
)


def shown(result: RenderableType, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(result)
    return stream.getvalue()


def row(text: str, label: str) -> list[str]:
    """The cells of the one line that starts with ``label``."""
    [line] = [line for line in text.splitlines() if line.startswith(label)]
    return line.removeprefix(label).split()


def test_demo_report_in_80_columns() -> None:
    text = shown(demo_report(RESULT))
    assert row(text, "accuracy, 160 unseen sentences") == ["99.50%", "98.50%", "-1.00", "points"]
    assert row(text, "the same answer as float") == ["90.00%"]
    assert row(text, "SQNR against float") == ["30.0", "dB"]
    assert row(text, "SQNR against the reference") == ["70.0", "dB"]
    assert row(text, "latency, median of 40 turns") == [
        "123",
        "ms",
        "4.00",
        "ms",
        "2.00x",
        "faster",
    ]
    assert row(text, "  the middle half of them") == ["120", "to", "130", "3.90", "to", "4.10"]
    assert row(text, "operations exact") == ["9", "of", "10"]
    assert row(text, "size on disk") == ["2.4", "MB", "800", "kB", "3.0x", "smaller"]
    assert row(text, "layers in int8") == ["7", "of", "10"]


def test_layers_with_one_reason_share_a_line() -> None:
    text = shown(demo_report(RESULT))
    assert "encoder.0 and 1 more: no kernel" in text
    assert "head: weight is [no] constant" in text  # no markup in what comes from a model


def test_nothing_declined_has_no_heading() -> None:
    text = shown(demo_report(dataclasses.replace(RESULT, declined=())))
    assert "Stays float" not in text


def test_slower_int8_is_called_slower() -> None:
    text = shown(demo_report(dataclasses.replace(RESULT, speedup=0.8)))
    assert row(text, "latency, median of 40 turns")[-2:] == ["1.25x", "slower"]


def test_a_busy_machine_is_named() -> None:
    assert UNSTEADY not in shown(demo_report(RESULT))
    unsteady = dataclasses.replace(RESULT, int8_latency=Timing(0.004, 0.0035, 0.0046))
    assert UNSTEADY in shown(demo_report(unsteady), 120)


def test_outputs_that_equal_the_reference() -> None:
    text = shown(demo_report(dataclasses.replace(RESULT, sqnr_reference=None)))
    assert row(text, "SQNR against the reference") == ["equal"]


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for result in (demo_report(RESULT), doctor_report(DIAGNOSIS)):
        assert max(map(len, shown(result, width).splitlines())) <= width


def test_doctor_report() -> None:
    text = shown(doctor_report(DIAGNOSIS))
    assert row(text, "CPU") == ["Some", "CPU,", "2", "cores,", "x86_64"]
    assert row(text, "C++ compiler") == ["none"]
    assert row(text, "backend good") == ["good-package", "1.0,", "works"]
    assert row(text, "backend bad") == [
        "bad-package",
        "2.0,",
        "does",
        "not",
        "work,",
        "see",
        "below",
    ]
    assert row(text, "int8 here") == ["good(is_dynamic=False)"]
    assert row(text, "  is_dynamic") == ["the", "[CPU]", "likes", "it"]
    assert "problem: bad cannot be imported [sic]" in text
    assert "risk: saturates" in text
    assert "No problem found" not in text


def test_doctor_report_says_what_bfloat16_is_worth() -> None:
    assert DIAGNOSIS.int8 is not None
    text = shown(doctor_report(DIAGNOSIS), width=200)
    assert "float_dtype=bfloat16 works here, but won't be faster" in text
    plan = dataclasses.replace(DIAGNOSIS.int8, bfloat16=("avx512_bf16",))
    text = shown(doctor_report(dataclasses.replace(DIAGNOSIS, int8=plan)), width=200)
    assert "won't be faster" not in text
    assert "avx512_bf16" in text


def test_doctor_report_of_a_healthy_machine() -> None:
    text = shown(doctor_report(dataclasses.replace(DIAGNOSIS, findings=(), backends=())))
    assert "No problem found." in text
    assert row(text, "backends") == ["none"]


def test_backends_table_folds_and_loses_nothing() -> None:
    entry = BackendEntry("name", "dist", "1.0", "module." * 20 + "x:Class", None)  # type: ignore[arg-type]
    text = shown(backends_table([entry]))
    assert "".join(text.split()).count("module.") == 20
