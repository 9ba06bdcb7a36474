"""Measures what quantizing did to a model: kernels, accuracy, speed and size, with a verdict."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch.fx import GraphModule

from versatil_core.backend import BasePT2EBackend
from versatil_core.batch_check import BatchError, checked_call
from versatil_core.errors import InputError
from versatil_core.export import ModelInputs, input_specs, private_copy
from versatil_core.kept_buffers import KeptBuffers
from versatil_core.lower import check_host
from versatil_core.model_accuracy import Metric, check_alike, check_metric
from versatil_core.progress import StageProgress
from versatil_core.reexport import example_call
from versatil_core.reference_info import reference_info
from versatil_core.report_gates import verdict_of
from versatil_core.report_request import ALL_PARTS, ROUNDS, Part, ReportRequest
from versatil_core.report_result import Report
from versatil_core.report_stages import (
    ReportWork,
    accuracy_stage,
    first_look,
    kernels_stage,
    speed_stage,
)
from versatil_core.speed import with_batch
from versatil_core.versions import check_versions

STATEFUL = (
    "The model writes to its own buffers. Accuracy is compared from their first values, at every batch; speed is "
    "not."
)


class ReportStoppedError(KeyboardInterrupt):
    """Ctrl-C while a report was made; :attr:`report` has what was measured until then."""

    def __init__(self, report: Report) -> None:
        """Keep the partial report."""
        super().__init__(report.verdict.sentence)
        self.report = report


def report(
    float_model: torch.nn.Module,
    reference: GraphModule,
    backend: BasePT2EBackend,
    data: Iterable[Any],
    *,
    metric: Metric | None = None,
    threads: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    rounds: int = ROUNDS,
    parts: Iterable[Part | str] = ALL_PARTS,
    title: str = "",
    progress: bool = False,
) -> Report:
    """Measure what quantizing did to a model.

    Args:
        float_model: The model that the reference was made of. It is measured in eval mode, and not changed.
        reference: From :func:`versatil_core.quantize` or :func:`versatil_core.load`.
        backend: The hardware in question: that of this machine.
        data: Batches of inputs, as for calibration; all are read and kept. Take others than those that
            the model was calibrated with.
        metric: Takes a model, which is called as ``float_model`` is, and returns a number or a mapping
            of names to numbers, such as an accuracy on labelled data. It is asked about the float model and about
            the compiled int8 model.
        threads: Numbers of threads to measure the speed with; those that torch uses if empty.
        batch_sizes: Batch sizes to measure the speed with; that of the first batch if empty.
        rounds: How often the models take turns in each configuration, at least 6.
        parts: What to measure: ``"kernels"``, ``"accuracy"``, ``"speed"``.
        title: The model in a few words; the name of its class if empty.
        progress: Whether to show progress on stderr.

    Returns:
        The report; ``print`` it, or write it with ``to_html(path)`` and ``to_json()``.

    Raises:
        InputError: A batch does not fit the reference, or there is none, or a batch size doesn't fit.
        ReportError: The float model or the metric fails, or it is not the model that was quantized.
        ExportError: The float model can't be copied, or not captured with these inputs.
        UnsupportedHostError: This machine does not have the backend's kernels.
        ReportStoppedError: Ctrl-C, a ``KeyboardInterrupt`` with the partial report.
        ValueError: ``threads``, ``batch_sizes``, ``rounds`` or ``parts`` are none.

    Example:
        >>> import torch
        >>> from versatil_core import host_backend, quantize, report
        >>> model, x, backend = torch.nn.Linear(8, 4), torch.randn(2, 8), host_backend()
        >>> reference = quantize(model, x, backend, calibration=[x])
        >>> result = report(model, reference, backend, [x], parts=["accuracy"])
        >>> result.accuracy.is_exact
        True
    """
    with StageProgress(Console(stderr=True) if progress else None) as stages:
        request = ReportRequest(
            metric=metric,
            threads=tuple(threads),
            batch_sizes=tuple(batch_sizes),
            rounds=rounds,
            parts=frozenset(map(Part, parts)),
            title=title,
            command="versatil_core.report",
        )
        return measure_report(float_model, reference, backend, data, request, stages)


def measure_report(
    float_model: torch.nn.Module,
    reference: GraphModule,
    backend: BasePT2EBackend,
    data: Iterable[Any],
    request: ReportRequest,
    progress: StageProgress,
) -> Report:
    """Do what :func:`report` does, with stages that are shown by ``progress``."""
    check_versions()
    check_host(backend)
    calls = report_calls(reference, data)
    own_model = private_copy(float_model)
    state = KeptBuffers(own_model, reference)
    work = ReportWork(own_model, reference, backend, calls, request, progress, state)
    try:
        return _measured(work)
    finally:
        state.restore()


def _measured(work: ReportWork) -> Report:
    request = work.request
    with work.progress.stage("check the models and the data"):
        check_alike(work.float_model, work.reference, work.calls[0])
        changed = work.state.keep_changed()
        work.state.restore()
        if request.metric is not None:
            check_metric(request.metric, work.float_model)
            work.state.restore()
        for size in request.batch_sizes:
            with_batch(work.reference, work.calls[0], size)
        found = first_look(work)
        work.state.restore()
    notes = (*request.notes, *found.notes, *((STATEFUL,) if changed else ()))
    found = replace(found, notes=notes)
    stages = {
        Part.KERNELS: kernels_stage,
        Part.ACCURACY: accuracy_stage,
        Part.SPEED: speed_stage,
    }
    wanted = [part for part in stages if part in request.parts]
    for index, part in enumerate(wanted):
        try:
            for step in stages[part](work, found):
                found = step
        except KeyboardInterrupt:
            unfinished = tuple(map(str, wanted[index:]))
            raise ReportStoppedError(_judged(replace(found, unfinished=unfinished))) from None
    return _judged(found)


def report_calls(reference: GraphModule, data: Iterable[Any]) -> tuple[ModelInputs, ...]:
    """Read batches, and check that the reference takes them.

    Raises:
        InputError: There is none, or one does not fit.
    """
    if isinstance(data, (torch.Tensor, Mapping)):
        raise InputError(
            f"data must be an iterable of batches, got one {type(data).__name__}: pass [data]"
        )
    specs = input_specs(reference)
    example = example_call(reference, reference_info(reference))
    names = [spec.name for spec in specs][: len(example.args)]
    calls = []
    for index, batch in enumerate(data):
        try:
            calls.append(checked_call(batch, specs, example, names))
        except BatchError as error:
            raise InputError(f"data batch {index}{error}", input_name=error.input_name) from None
    if not calls:
        raise InputError("data has no batches: a generator that has been read is empty")
    return tuple(calls)


def _judged(found: Report) -> Report:
    return replace(found, verdict=verdict_of(found))
