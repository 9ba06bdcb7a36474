"""Measure what each observer of activations does for two models with real weights and data.

    cd tools && python -m bench.observers

MiniLM on sentences and the digits CNN on images, both static. They are calibrated with data of
their own and judged by other data: SQNR to float over all outputs together, and right answers.
stdout is the result, stderr the progress.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch.fx import GraphModule

from bench.machine import cpu_text
from versatil_core import BasePT2EBackend, QuantizationTarget, quantize, sqnr_db
from versatil_core.calibration import calibrate
from versatil_core.convert import convert
from versatil_core.demo_digits import digits_subject
from versatil_core.demo_minilm import minilm_subject
from versatil_core.demo_subject import Subject
from versatil_core.export import export
from versatil_core.observer_choice import OBSERVER_NAMES
from versatil_core.prepare import prepare_in_place
from versatil_core.progress import StageProgress
from versatil_x86 import X86InductorBackend

FLOAT, OWN = "float", "none chosen"
SUBJECTS = {"minilm": minilm_subject, "digits": digits_subject}


@dataclass(frozen=True)
class Row:
    """One model, with one observer or in float.

    Attributes:
        reference_db: SQNR of the reference against float; None for float itself.
        right: Right answers.
        same: Answers that are float's.
        answers: Answers.
        calibrate_seconds: Time to show all batches to the observers.
        convert_seconds: Time to choose the ranges and to make the reference.
        equalized_db: As ``reference_db``, with ``equalize=True``; None if it was not asked for.
    """

    reference_db: float | None
    right: int
    same: int
    answers: int
    calibrate_seconds: float | None = None
    convert_seconds: float | None = None
    equalized_db: float | None = None


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SUBJECTS, action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    backend = X86InductorBackend.for_host()
    results = {}
    with StageProgress(Console(stderr=True)) as progress, torch.no_grad():
        for name in arguments.model or SUBJECTS:
            with torch.enable_grad():
                subject = SUBJECTS[name](progress)
            results[name] = measure(subject, backend, progress)
            if not arguments.json:
                Console(highlight=False).print(table(subject, results[name]))
    if arguments.json:
        rows = {
            name: {observer: asdict(row) for observer, row in found.items()}
            for name, found in results.items()
        }
        print(json.dumps(rows, indent=2, allow_nan=False))
    else:
        print(f"{cpu_text()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
        print(backend)


def measure(subject: Subject, backend: BasePT2EBackend, progress: StageProgress) -> dict[str, Row]:
    """Quantize with each observer, and judge."""
    truth = _outputs(subject.model, subject)
    answers = subject.answers(truth)
    is_right = subject.is_right(answers)
    rows = {FLOAT: Row(None, int(is_right.sum()), len(answers), len(answers))}
    has_linears = sum(isinstance(each, torch.nn.Linear) for each in subject.model.modules()) > 1
    for name in (OWN, *OBSERVER_NAMES):
        with progress.stage(f"{subject.title}: {name}"):
            choice = {} if name == OWN else {"": name}
            reference, calibrated, converted = quantized(subject, backend, choice)
            outputs = _outputs(reference, subject)
            found = subject.answers(outputs)
            rows[name] = Row(
                reference_db=sqnr_db(outputs, truth),
                right=int(subject.is_right(found).sum()),
                same=int((found == answers).sum()),
                answers=len(answers),
                calibrate_seconds=calibrated,
                convert_seconds=converted,
                equalized_db=(
                    sqnr_db(_outputs(equalized(subject, backend, choice), subject), truth)
                    if has_linears
                    else None
                ),
            )
    return rows


def quantized(
    subject: Subject, backend: BasePT2EBackend, choice: dict[str, str]
) -> tuple[GraphModule, float, float]:
    """Quantize step by step, as `quantize` does, and time the two steps of an observer."""
    example, *_ = subject.held_out
    prepared = prepare_in_place(
        export(subject.model, example), [QuantizationTarget("", backend)], choice
    )
    start = time.perf_counter()
    calibrate(prepared, subject.calibration, example)
    middle = time.perf_counter()
    reference = convert(prepared)
    return reference, middle - start, time.perf_counter() - middle


def equalized(subject: Subject, backend: BasePT2EBackend, choice: dict[str, str]) -> GraphModule:
    """Quantize with equalization, which goes by the same observer."""
    example, *_ = subject.held_out
    return quantize(
        subject.model, example, backend, subject.calibration, equalize=True, observers=choice
    )


def table(subject: Subject, rows: dict[str, Row]) -> Table:
    """Show one model, in 80 columns."""
    shown = Table(
        title=f"{subject.title}, static int8; {subject.held_out_name}",
        title_justify="left",
        show_edge=False,
        pad_edge=False,
    )
    shown.add_column("", no_wrap=True)
    for heading in (
        "SQNR to\nfloat, dB",
        "with\nequalize",
        "right\nanswers",
        "same as\nfloat",
        "cali-\nbrate, s",
        "con-\nvert, s",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        shown.add_row(
            name,
            _text(row.reference_db, ".1f"),
            _text(row.equalized_db, ".1f"),
            f"{row.right / row.answers:.1%}",
            f"{row.same / row.answers:.1%}",
            _text(row.calibrate_seconds, ".2f"),
            _text(row.convert_seconds, ".2f"),
        )
    return shown


def _text(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _outputs(model: torch.nn.Module, subject: Subject) -> torch.Tensor:
    return torch.cat([model(*batch) for batch in subject.held_out])


if __name__ == "__main__":
    main()
