"""What ``versatil report``, ``bench`` and ``compare`` do, apart from the command line."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from versatil_core.atomic_file import replacing
from versatil_core.audit import audit
from versatil_core.command_quantize import backend_of
from versatil_core.discovery import host_backend
from versatil_core.errors import InputError
from versatil_core.excluded_layers import float_layers_outside
from versatil_core.model_factory import ModelSource, load_batches, load_metric, load_model_source
from versatil_core.progress import StageProgress
from versatil_core.reexport import example_call
from versatil_core.reference_info import reference_info
from versatil_core.report import measure_report
from versatil_core.report_gates import gates_of
from versatil_core.report_request import ROUNDS, Part, ReportRequest
from versatil_core.report_result import Report
from versatil_core.saved_reference import load

__all__ = ["MeasureJob", "measure", "partial_path", "write_report"]

SEEN_BEFORE = (
    "The data are the batches that the factory returns for calibration: on data that the model was "
    "not calibrated with, the accuracy may be lower."
)


@dataclass(frozen=True)
class MeasureJob:
    """What a command was asked for.

    Attributes:
        model: A portable file.
        float_source: See `versatil_core.model_factory.load_model_source`.
        parts: See `versatil_core.report_request.Part`.
        data: See `versatil_core.model_factory.load_batches`.
        metric: See `versatil_core.model_factory.load_metric`.
        threads: Numbers of threads; torch's own if empty.
        batch_sizes: Batch sizes; that of the data if empty.
        rounds: How often the models take turns.
        backend: ``"auto"``, a name, or None for the one that the model was quantized for.
        command: The command line.
    """

    model: Path
    float_source: str
    parts: tuple[str, ...]
    data: Path | None = None
    metric: str | None = None
    threads: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    rounds: int = ROUNDS
    backend: str | None = None
    command: str = ""


def measure(job: MeasureJob, gates: Mapping[str, Any], progress: StageProgress) -> Report:
    """Load what the job names, and measure it.

    Args:
        job: What to measure.
        gates: Keyword arguments of `versatil_core.report_gates.gates_of`.
        progress: Shows the stages.

    Raises:
        VersatilError: See `versatil_core.load`, `versatil_core.report` and
            `versatil_core.model_factory`.
        ReportStoppedError: Ctrl-C; has the partial report.
    """
    with progress.stage("load the models"):
        reference = load(job.model)
        if job.backend is None:
            backend = backend_of(reference)
        else:
            backend = host_backend(None if job.backend == "auto" else job.backend)
        source = load_model_source(job.float_source)
        metric = None if job.metric is None else load_metric(job.metric)
        # A typing error in a path shows now, not after the long work.
        float_layers_outside(audit(reference, backend).layers, gates.get("excluded", ()))
    data, notes = _data(job, source, reference)
    request = ReportRequest(
        metric=metric,
        threads=job.threads,
        batch_sizes=job.batch_sizes,
        rounds=job.rounds,
        parts=frozenset(map(Part, job.parts)),
        title=job.model.name,
        command=job.command,
        notes=notes,
    )
    found = measure_report(source.model, reference, backend, data, request, progress)
    return replace(found, gates=gates_of(found, **gates))


def write_report(report: Report, path: Path) -> None:
    """Write a report into a .html or .json file, whole or not at all."""
    if path.suffix == ".html":
        report.to_html(path)
        return
    with replacing(path) as file:
        file.write(report.to_json().encode())


def partial_path(outputs: Iterable[Path]) -> Path:
    """Return where a stopped run leaves what it has: beside the first output, never in its place."""
    first = next(iter(outputs), Path("report.html"))
    return first.with_name(f"{first.stem}.partial.json")


def _data(
    job: MeasureJob, source: ModelSource, reference: GraphModule
) -> tuple[Iterable[Any], tuple[str, ...]]:
    example = example_call(reference, reference_info(reference))
    if job.data is not None:
        return load_batches(job.data, dict(example.kwargs) or example.args), ()
    if source.calibration:
        return source.calibration, (SEEN_BEFORE,) if "accuracy" in job.parts else ()
    if "accuracy" in job.parts:
        raise InputError(
            f"there are no data to compare the models on: give --data, or let {job.float_source} "
            f"return (model, example_inputs, calibration)"
        )
    return [source.example_inputs or example], ()
