"""The stages in which a report is measured; each returns the report with what it found."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from versatil_core.audit import audit
from versatil_core.backend import BasePT2EBackend
from versatil_core.compile import CompiledModel
from versatil_core.compile import compile as compile_int8
from versatil_core.discovery import installed_backends
from versatil_core.environment_report import environment_of
from versatil_core.exactness import check_exactness
from versatil_core.exactness_report import ExactnessReport, OpExactness
from versatil_core.export import ModelInputs
from versatil_core.float_program import save_float_program
from versatil_core.int8_islands import joined_layers
from versatil_core.kept_buffers import KeptBuffers
from versatil_core.kernel_trace import ModelTrace, TraceError, trace_model
from versatil_core.layer_accuracy import GraphErrors, graph_errors
from versatil_core.layer_kernels import kernels_of_layers, problems_of
from versatil_core.layer_report import KernelRun, LayerAccuracy, LayerReport
from versatil_core.lower import lower, lowered_copy, lowering_record
from versatil_core.model_accuracy import OutputErrors, measure_metric, output_errors, run_on
from versatil_core.number_text import counted
from versatil_core.progress import StageProgress
from versatil_core.recorded_values import ValueRecorder, copies_of
from versatil_core.report_request import ReportRequest
from versatil_core.report_result import Accuracy, MetricResult, Report, Size, Verdict, VerdictCode
from versatil_core.saved_reference import save
from versatil_core.speed import measure_speed, sample_count, torch_threads, with_batch
from versatil_passes import LoweredOp

UNRELATED_DB = 3.0
UNRELATED = (
    "The outputs have next to nothing in common with the float model's. Is it the model that was quantized, with "
    "the same weights? A factory that draws random ones has to set the seed."
)
_BIAS_FIRST = {"addmm", "baddbmm", "addbmm", "addmv"}
_WEIGHT_FIRST = {"embedding", "embedding_bag"}
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
    state: KeptBuffers
    _compiled: dict[int, CompiledModel] = field(default_factory=dict)

    @property
    def first_call(self) -> ModelInputs:
        """The inputs of the first configuration of the speed measurement."""
        return with_batch(self.reference, self.calls[0], self.batch_sizes[0])

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Those to measure the speed with."""
        return self.request.batch_sizes or (sample_count(self.reference, self.calls[0]),)

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
        first, second = (
            () if operand is None else shape(recorder.values[operand.name])
            for operand in _operands(nodes[layer.node], layer.op)
        )
        layers.append(
            LayerReport(
                module_path=layer.module_path,
                op=layer.op,
                node=layer.node,
                input_shape=first,
                weight_shape=second,
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


def _operands(node: Node, op: str) -> tuple[Node | None, Node | None]:
    """The input of a layer and its weight, or what it is multiplied by, wherever they stand among the arguments."""
    arguments = [each if isinstance(each, Node) else None for each in node.args]
    if op in _BIAS_FIRST:
        arguments = arguments[1:]
    first, second = [*arguments, None, None][:2]
    return (second, first) if op in _WEIGHT_FIRST else (first, second)


def accuracy_stage(work: ReportWork, found: Report) -> Iterator[Report]:
    """Compare whole models and single layers, on the data; yield the report when it is done."""
    calls, progress = work.calls, work.progress
    int8_model = work.int8_model(torch.get_num_threads())
    with progress.stage("compile the int8 model"):
        run_on(int8_model, calls[0])
        work.state.restore()
    with progress.stage("run all batches", total=len(calls)) as advance:
        outputs = output_errors(
            work.float_model,
            work.reference,
            int8_model,
            calls,
            before_run=work.state.restore,
            on_batch=advance,
        )
        work.state.restore()
    with progress.stage("compare op by op with the reference"):
        lowered = lower(work.reference, work.backend)
        exactness = check_exactness(work.reference, lowered, calls[0])
    looked_at = calls[:LAYER_BATCHES]
    with progress.stage("find the error of each layer", total=len(looked_at)) as advance:
        errors = graph_errors(
            work.float_model,
            work.reference,
            looked_at,
            before_run=work.state.restore,
            on_batch=advance,
        )
        work.state.restore()
    metrics: tuple[MetricResult, ...] = ()
    if work.request.metric is not None:
        with progress.stage("ask the metric"):
            models = {"float": work.float_model, "int8": int8_model}
            metrics = measure_metric(work.request.metric, models)
            work.state.restore()
    if outputs.has_floats and outputs.reference_to_float.db < UNRELATED_DB:
        found = _with_note(found, UNRELATED)
    exact_ops = {op.node: op for op in exactness.ops}
    lowered_ops = {op.node: op for op in lowering_record(lowered).lowered}
    yield replace(
        found,
        layers=tuple(
            replace(layer, accuracy=_layer_accuracy(layer, errors, lowered_ops, exact_ops))
            for layer in found.layers
        ),
        ranges=errors.ranges,
        accuracy=_whole_accuracy(work, outputs, exactness, metrics),
    )


def _whole_accuracy(
    work: ReportWork,
    outputs: OutputErrors,
    exactness: ExactnessReport,
    metrics: tuple[MetricResult, ...],
) -> Accuracy:
    found = Accuracy(
        batches=len(work.calls),
        samples=sum(sample_count(work.reference, call) for call in work.calls),
        layer_batches=min(len(work.calls), LAYER_BATCHES),
        sqnr_db=outputs.int8_to_float.db,
        reference_sqnr_db=outputs.reference_to_float.db,
        kernels_sqnr_db=outputs.int8_to_reference.db,
        cosine=outputs.cosine,
        max_error=outputs.max_error,
        equal_share=outputs.equal_share,
        exact_ops=len(exactness.ops) - len(exactness.disagreements),
        ops=len(exactness.ops),
        are_inputs_untouched=exactness.are_inputs_untouched,
        metrics=metrics,
    )
    if outputs.has_floats:
        return found
    return replace(found, sqnr_db=None, reference_sqnr_db=None, kernels_sqnr_db=None, cosine=None)


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


def speed_stage(work: ReportWork, found: Report) -> Iterator[Report]:
    """Measure every combination of threads and batch sizes; yield the report after each."""
    for threads in work.request.threads or (torch.get_num_threads(),):
        for size in work.batch_sizes:
            call = with_batch(work.reference, work.calls[0], size)
            int8_model = work.int8_model(threads)
            where = f"{counted(threads, 'thread')}, batch {size}"
            with (
                work.progress.stage(f"compile for {where}"),
                torch_threads(threads),
            ):
                run_on(int8_model, call)
            total = work.request.rounds + 1
            with work.progress.stage(f"measure with {where}", total=total) as advance:
                point = measure_speed(
                    work.float_model,
                    int8_model,
                    work.backend,
                    call,
                    threads=threads,
                    batch=size,
                    rounds=work.request.rounds,
                    on_step=advance,
                )
            work.state.restore()
            found = replace(found, speed=(*found.speed, point))
            yield found


def kernels_stage(work: ReportWork, found: Report) -> Iterator[Report]:
    """Run both models in processes of their own: kernels, first result, memory, size.

    The report is yielded after each step.
    """
    call, threads = work.first_call, (work.request.threads or (torch.get_num_threads(),))[0]
    with tempfile.TemporaryDirectory(prefix="versatil_") as name:
        folder = Path(name)
        with work.progress.stage("write both models"):
            try:
                found = replace(found, size=_written_sizes(work, folder))
            except TraceError as error:
                yield _with_note(found, f"Size and kernels are unknown: {error}")
                return
        yield found
        if work.backend.name not in {entry.name for entry in installed_backends()}:
            yield _with_note(
                found,
                f"Which kernels ran is unknown: backend {work.backend.name!r} is not registered, so that "
                f"no other process can make it",
            )
            return
        for kind in ("float", "int8"):
            with work.progress.stage(f"watch the kernels of the {kind} model"):
                try:
                    trace = trace_model(
                        kind, f"{kind}.pt2", folder, call, work.backend, threads=threads
                    )
                    found = _with_trace(found, kind, trace)
                except TraceError as error:
                    found = _with_note(
                        found,
                        f"Which kernels ran in the {kind} model is unknown, its process failed: {error}",
                    )
            yield found


def _with_note(found: Report, note: str) -> Report:
    return replace(found, notes=(*found.notes, note))


def _written_sizes(work: ReportWork, folder: Path) -> Size:
    try:
        save_float_program(work.float_model, work.first_call, folder / "float.pt2")
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        raise TraceError(
            f"torch.export refuses the float model: {type(error).__name__}: {lines[0]}"
        ) from error
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
    else:
        layers = [replace(layer, int8_run=kernel) for layer, kernel in pairs]
        size = replace(size, int8_call=call, int8_process=process)
    first_result = {**found.first_result, kind: trace.first_result}
    notes = (*found.notes, *_kernel_notes(pairs, kind))
    return replace(found, layers=tuple(layers), first_result=first_result, size=size, notes=notes)


def _kernel_notes(
    pairs: Sequence[tuple[LayerReport, KernelRun | None]], kind: str
) -> Iterator[str]:
    """Say of which layers no kernel was seen, or another one than promised."""
    unseen = [layer.name for layer, kernel in pairs if kernel is None and problems_of(layer)]
    wrong = [
        layer.name
        for layer, kernel in pairs
        if kind == "int8" and layer.is_int8 and kernel is not None and not kernel.is_int8
    ]
    if unseen:
        yield f"No kernel was seen in the {kind} model that fits {', '.join(unseen)}"
    if wrong:
        yield (
            f"A float kernel was seen for {', '.join(wrong)}, where an int8 one was expected: please "
            f"report this"
        )
