"""The commands ``report``, ``bench`` and ``compare``: each measures some parts of a report."""

import shlex
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from versatil_core.command_options import AsJson, Exclude, OtherBackend, RequireInt8, Verbose

if TYPE_CHECKING:
    from rich.console import Console

    from versatil_core.report_result import Gate, Report

__all__ = ["bench", "compare", "report"]

STOPPED_EXIT_CODE = 130
"""What a shell shows for a command that SIGINT ended."""

Quantized = Annotated[Path, typer.Argument(metavar="MODEL", help="A file that `quantize` wrote.")]
FloatOption = Annotated[
    str,
    typer.Option(
        "--float",
        metavar="SOURCE",
        help="The model before it was quantized: package.module:factory or a .pt2 file, as for "
        "`quantize`.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Batches of inputs, other ones than for calibration: a .pt or .npz file, as for "
        "`quantize --calibration`. If left out, those that the factory returns.",
    ),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="package.module:function, which takes a model and returns a number, or a dictionary "
        "of numbers by name: such as its accuracy on labelled data.",
    ),
]
Threads = Annotated[
    str, typer.Option(help="Numbers of threads to measure with, such as 1,2; torch's own if empty.")
]
Batch = Annotated[
    str, typer.Option(help="Batch sizes to measure with, such as 1,8; that of the data if empty.")
]
Rounds = Annotated[int, typer.Option(min=6, help="How often the models take turns.")]
Output = Annotated[
    list[Path] | None,
    typer.Option(
        "--output", "-o", help="A .html or .json file to write. Repeatable.", dir_okay=False
    ),
]
MinSpeedup = Annotated[
    float | None,
    typer.Option(
        help="Exit with 1 unless int8 is so many times faster than the compiled float model, in "
        "each configuration."
    ),
]
MinSQNR = Annotated[
    float | None,
    typer.Option(help="Exit with 1 unless the outputs' SQNR against float is so many dB."),
]


def report(
    model: Quantized,
    float_source: FloatOption,
    *,
    data: Data = None,
    output: Output = None,
    metric: MetricOption = None,
    threads: Threads = "",
    batch: Batch = "",
    rounds: Rounds = 30,
    backend: OtherBackend = None,
    min_speedup: MinSpeedup = None,
    min_sqnr: MinSQNR = None,
    require_int8: RequireInt8 = False,
    exclude: Exclude = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show what quantizing did: kernels, accuracy, speed, size, and whether it was worth it.

    Ctrl-C stops it, and leaves what was measured in a .partial.json file.
    """
    if exclude and not require_int8:
        raise typer.BadParameter("it goes with --require-int8", param_hint="--exclude")
    gates = {
        "min_speedup": min_speedup,
        "min_sqnr_db": min_sqnr,
        "require_int8": require_int8,
        "excluded": exclude or (),
    }
    job = {
        "parts": ("kernels", "accuracy", "speed"),
        "data": data,
        "metric": metric,
        "backend": backend,
        **_configurations(threads, batch, rounds),
    }
    _run(model, float_source, job, gates, output, is_json=as_json, is_verbose=verbose)


def bench(
    model: Quantized,
    float_source: FloatOption,
    *,
    data: Data = None,
    output: Output = None,
    threads: Threads = "",
    batch: Batch = "",
    rounds: Rounds = 30,
    backend: OtherBackend = None,
    min_speedup: MinSpeedup = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Measure how fast int8 is: against the float model, eager and compiled, in turns."""
    job = {
        "parts": ("speed",),
        "data": data,
        "backend": backend,
        **_configurations(threads, batch, rounds),
    }
    gates = {"min_speedup": min_speedup}
    _run(model, float_source, job, gates, output, is_json=as_json, is_verbose=verbose)


def compare(
    float_source: Annotated[
        str,
        typer.Argument(
            metavar="FLOAT",
            help="The model before it was quantized: package.module:factory or a .pt2 file, as "
            "for `quantize`.",
        ),
    ],
    model: Quantized,
    *,
    data: Data = None,
    output: Output = None,
    metric: MetricOption = None,
    backend: OtherBackend = None,
    min_sqnr: MinSQNR = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show where the accuracy went: of the whole model and of each layer."""
    job = {"parts": ("accuracy",), "data": data, "metric": metric, "backend": backend}
    gates = {"min_sqnr_db": min_sqnr}
    _run(model, float_source, job, gates, output, is_json=as_json, is_verbose=verbose)


def _run(
    model: Path,
    float_source: str,
    job: dict[str, Any],
    gates: dict[str, Any],
    output: Iterable[Path] | None,
    *,
    is_json: bool,
    is_verbose: bool,
) -> None:
    outputs = _checked_outputs(output or ())
    from versatil_core.command_job import job as command_job

    with command_job(is_verbose=is_verbose) as console:
        from versatil_core.command_measure import MeasureJob, measure, write_report
        from versatil_core.progress import StageProgress
        from versatil_core.report import ReportStoppedError

        try:
            with StageProgress(console) as progress:
                command = shlex.join(["versatil", *sys.argv[1:]])
                wanted = MeasureJob(model=model, float_source=float_source, command=command, **job)
                found = measure(wanted, gates, progress)
        except ReportStoppedError as stopped:
            _leave_partial(stopped.report, outputs, is_json=is_json)
            raise typer.Exit(STOPPED_EXIT_CODE) from None
        _show(found, is_json=is_json)
        for path in outputs:
            write_report(found, path)
            if not is_json:
                typer.echo(f"Written to {path}")
        _fail_if_not_passed(found.gates, console)


def _leave_partial(stopped: "Report", outputs: Iterable[Path], *, is_json: bool) -> None:
    from versatil_core.command_measure import partial_path, write_report

    path = partial_path(outputs)
    write_report(stopped, path)
    if is_json:
        typer.echo(stopped.to_json())
    typer.echo(f"stopped: what was measured until then is in {path}", err=True)


def _show(found: "Report", *, is_json: bool) -> None:
    if is_json:
        typer.echo(found.to_json())
        return
    from versatil_core.command_tables import print_result

    print_result(found)


def _fail_if_not_passed(gates: Iterable["Gate"], console: "Console") -> None:
    failed = [gate for gate in gates if not gate.is_passed]
    for gate in failed:
        console.print(f"error: {gate.text}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _checked_outputs(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Refuse at once what could only fail after the long work."""
    for path in paths:
        if path.suffix not in {".html", ".json"}:
            raise typer.BadParameter(
                f"{path}: a report is a .html or a .json file", param_hint="--output"
            )
        if not path.parent.is_dir():
            raise typer.BadParameter(f"no such folder: {path.parent}", param_hint="--output")
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise typer.BadParameter(
                f"{path} cannot be written: {error}", param_hint="--output"
            ) from error
    return tuple(paths)


def _configurations(threads: str, batch: str, rounds: int) -> dict[str, Any]:
    return {
        "threads": _numbers(threads, "--threads"),
        "batch_sizes": _numbers(batch, "--batch"),
        "rounds": rounds,
    }


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise typer.BadParameter(
            f"{text!r}: numbers of at least 1, separated by commas", param_hint=option
        )
    return numbers
