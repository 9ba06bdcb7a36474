"""The stages in which a report is measured; each returns the report with what it found."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from versatil_core.audit import audit
from versatil_core.backend import BasePT2EBackend
from versatil_core.compile import CompiledModel
from versatil_core.compile import compile as compile_int8
from versatil_core.discovery import installed_backends
from versatil_core.environment_report import environment_of
from versatil_core.exactness import check_exactness
from versatil_core.exactness_report import OpExactness
from versatil_core.export import ModelInputs, tracing
from versatil_core.int8_islands import joined_layers
from versatil_core.kernel_trace import ModelTrace, TraceError, trace_model
from versatil_core.layer_accuracy import GraphErrors, graph_errors
from versatil_core.layer_kernels import kernels_of_layers
from versatil_core.layer_report import KernelRun, LayerAccuracy, LayerReport
from versatil_core.lower import lower, lowered_copy
from versatil_core.model_accuracy import measure_metric, output_errors
from versatil_core.progress import StageProgress
from versatil_core.recorded_values import ValueRecorder, copies_of
from versatil_core.report_request import ReportRequest
from versatil_core.report_result import Accuracy, MetricResult, Report, Size, Verdict, VerdictCode
from versatil_core.saved_reference import save
from versatil_core.speed import batch_size, measure_speed, torch_threads, with_batch
from versatil_passes import LoweredOp

LAYER_BATCHES = 4
"""So many batches show what each layer does; all of them, what the whole model does."""


@dataclass
class ReportWork:
    """What the stages share."""

    float_model: torch.nn.Module
    reference: GraphModule
    backend: BasePT2EBackend
    calls: tuple[ModelInputs, ...]
    request: ReportRequest
    progress: StageProgress
    _compiled: dict[int, CompiledModel] = field(default_factory=dict)

    @property
    def first_call(self) -> ModelInputs:
        """The inputs of the first configuration of the speed measurement."""
        sizes = self.request.batch_sizes or (_samples(self.calls[0]),)
        return with_batch(self.reference, self.calls[0], sizes[0])

    def int8_model(self, threads: int) -> CompiledModel:
        """Compile for so many threads; generated code is made for a number of them."""
        if threads not in self._compiled:
            self._compiled[threads] = compile_int8(self.reference, self.backend)
        return self._compiled[threads]


def first_look(work: ReportWork) -> Report:
    """What is known without measuring: layers with their shapes, notes, environment."""
    audited = audit(work.reference, work.backend)
    lowered, record = lowered_copy(work.reference, work.backend.lowering_rules)
    joined = joined_layers(lowered, record)
    with torch.no_grad():
        recorder = ValueRecorder(work.reference)
        recorder.run(*copies_of(work.first_call.leaves))
    nodes = {node.name: node for node in work.reference.graph.nodes}

    def shape(value: Any) -> tuple[int, ...]:
        return tuple(value.shape) if isinstance(value, torch.Tensor) else ()

    layers = []
    for layer in audited.layers:
        inputs = [shape(recorder.values[each.name]) for each in nodes[layer.node].all_input_nodes]
        layers.append(
            LayerReport(
                module_path=layer.module_path,
                op=layer.op,
                node=layer.node,
                input_shape=inputs[0] if inputs else (),
                weight_shape=inputs[1] if len(inputs) > 1 else (),
                output_shape=shape(recorder.values[layer.node]),
                is_int8=layer.is_int8,
                post_ops=layer.post_ops,
                output_dtype=layer.output_dtype,
                reason=layer.reason,
                may_saturate=layer.may_saturate,
                is_joined=layer.node in joined,
            )
        )
    return Report(
        title=work.request.title or type(work.float_model).__name__,
        verdict=Verdict(VerdictCode.INCOMPLETE, ""),
        environment=environment_of(work.reference, work.backend, work.request.command),
        layers=tuple(layers),
        notes=audited.notes,
    )


def accuracy_stage(work: ReportWork, found: Report) -> Report:
    """Compare whole models and single layers, on the data."""
    calls, progress = work.calls, work.progress
    int8_model = work.int8_model(torch.get_num_threads())
    with progress.stage("compile the int8 model"):
        int8_model(*calls[0].args, **calls[0].kwargs)
    with progress.stage("run all batches", total=len(calls)) as advance:
        outputs = output_errors(
            work.float_model, work.reference, int8_model, calls, on_batch=advance
        )
    with progress.stage("compare op by op with the reference"):
        lowered = lower(work.reference, work.backend)
        exactness = check_exactness(work.reference, lowered, calls[0])
    looked_at = calls[:LAYER_BATCHES]
    with progress.stage("find the error of each layer", total=len(looked_at)) as advance:
        errors = graph_errors(work.float_model, work.reference, looked_at, on_batch=advance)
    metrics: tuple[MetricResult, ...] = ()
    if work.request.metric is not None:
        with progress.stage("ask the metric"):
            models = {"float": work.float_model, "int8": int8_model}
            metrics = measure_metric(work.request.metric, models)
    _, record = lowered_copy(work.reference, work.backend.lowering_rules)
    exact_ops = {op.node: op for op in exactness.ops}
    lowered_ops = {op.node: op for op in record.lowered}
    return replace(
        found,
        layers=tuple(
            replace(layer, accuracy=_layer_accuracy(layer, errors, lowered_ops, exact_ops))
            for layer in found.layers
        ),
        ranges=errors.ranges,
        accuracy=Accuracy(
            batches=len(calls),
            samples=sum(_samples(call) for call in calls),
            layer_batches=len(looked_at),
            sqnr_db=outputs.int8_to_float.db,
            reference_sqnr_db=outputs.reference_to_float.db,
            kernels_sqnr_db=outputs.int8_to_reference.db,
            cosine=outputs.cosine,
            max_error=outputs.max_error,
            exact_ops=len(exactness.ops) - len(exactness.disagreements),
            ops=len(exactness.ops),
            are_inputs_untouched=exactness.are_inputs_untouched,
            metrics=metrics,
        ),
    )


def _layer_accuracy(
    layer: LayerReport,
    errors: GraphErrors,
    lowered_ops: Mapping[str, LoweredOp],
    exact_ops: Mapping[str, OpExactness],
) -> LayerAccuracy | None:
    node = errors.nodes.get(layer.node)
    if node is None:
        return None
    op = lowered_ops.get(layer.node)
    exactness = None if op is None else exact_ops.get(op.replaces[-1])
    return LayerAccuracy(
        introduced_db=node.introduced.db,
        accumulated_db=node.accumulated.db,
        is_exact=None if exactness is None else exactness.is_exact,
        exactness="" if exactness is None else exactness.difference,
    )


def speed_stage(work: ReportWork, found: Report) -> Report:
    """Measure every combination of threads and batch sizes that was asked for."""
    request, calls = work.request, work.calls
    points = []
    sizes = request.batch_sizes or (_samples(calls[0]),)
    for threads in request.threads or (torch.get_num_threads(),):
        for size in sizes:
            call = with_batch(work.reference, calls[0], size)
            int8_model = work.int8_model(threads)
            where = f"{threads} {'thread' if threads == 1 else 'threads'}, batch {size}"
            with (
                work.progress.stage(f"compile for {where}"),
                torch_threads(threads),
            ):
                int8_model(*call.args, **call.kwargs)
            total = request.rounds + 1
            with work.progress.stage(f"measure with {where}", total=total) as advance:
                points.append(
                    measure_speed(
                        work.float_model,
                        int8_model,
                        work.backend,
                        call,
                        threads=threads,
                        rounds=request.rounds,
                        on_step=advance,
                    )
                )
    return replace(found, speed=tuple(points))


def _samples(call: ModelInputs) -> int:
    return batch_size([leaf.shape for leaf in call.leaves if isinstance(leaf, torch.Tensor)])


def kernels_stage(work: ReportWork, found: Report) -> Report:
    """Run both models in processes of their own: kernels, first result, memory, size."""
    call, threads = work.first_call, (work.request.threads or (torch.get_num_threads(),))[0]
    with tempfile.TemporaryDirectory(prefix="versatil_") as name:
        folder = Path(name)
        with work.progress.stage("write both models"):
            found = replace(found, size=_written_sizes(work, folder))
        if work.backend.name not in {entry.name for entry in installed_backends()}:
            note = (
                f"Which kernels ran is unknown: backend {work.backend.name!r} is not registered, so that no "
                f"other process can make it"
            )
            return replace(found, notes=(*found.notes, note))
        for kind in ("float", "int8"):
            with work.progress.stage(f"watch the kernels of the {kind} model"):
                try:
                    trace = trace_model(
                        kind, f"{kind}.pt2", folder, call, work.backend, threads=threads
                    )
                except TraceError as error:
                    note = f"Which kernels ran in the {kind} model is unknown, its process failed: {error}"
                    found = replace(found, notes=(*found.notes, note))
                    continue
            found = _with_trace(found, kind, trace)
    return found


def _written_sizes(work: ReportWork, folder: Path) -> Size:
    call = work.first_call
    with torch.no_grad(), tracing:
        program = torch.export.export(work.float_model, call.args, dict(call.kwargs))
    program.example_inputs = None  # data, no part of the model
    torch.export.save(program, folder / "float.pt2")
    save(work.reference, folder / "int8.pt2")
    return Size(
        float_file=(folder / "float.pt2").stat().st_size,
        int8_file=(folder / "int8.pt2").stat().st_size,
        float_weights=_weight_bytes(work.float_model),
        int8_weights=_weight_bytes(work.reference),
    )


def _weight_bytes(module: torch.nn.Module) -> int:
    """Parameters and buffers; tensors that share memory count once."""
    tensors = [*module.parameters(), *module.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _with_trace(found: Report, kind: str, trace: ModelTrace) -> Report:
    kernels = kernels_of_layers(found.layers, trace.runs, is_float=kind == "float")
    pairs = [*zip(found.layers, kernels, strict=True)]
    size = found.size
    assert size is not None
    call, process = trace.call_bytes, trace.process_bytes
    if kind == "float":
        layers = [replace(layer, float_run=kernel) for layer, kernel in pairs]
        size = replace(size, float_call=call, float_process=process)
        notes = found.notes
    else:
        layers = [replace(layer, int8_run=kernel) for layer, kernel in pairs]
        size = replace(size, int8_call=call, int8_process=process)
        notes = (*found.notes, *_kernel_notes(pairs))
    first_result = {**found.first_result, kind: trace.first_result}
    return replace(found, layers=tuple(layers), first_result=first_result, size=size, notes=notes)


def _kernel_notes(pairs: Sequence[tuple[LayerReport, KernelRun | None]]) -> Iterator[str]:
    """Say of which int8 layers no int8 kernel was seen."""
    unseen = [layer.name for layer, kernel in pairs if layer.is_int8 and kernel is None]
    wrong = [
        layer.name
        for layer, kernel in pairs
        if layer.is_int8 and kernel is not None and not kernel.is_int8
    ]
    if unseen:
        yield f"No kernel was seen that fits the int8 layers {', '.join(unseen)}"
    if wrong:
        yield (
            f"A float kernel was seen for {', '.join(wrong)}, where an int8 one was expected: please "
            f"report this"
        )
