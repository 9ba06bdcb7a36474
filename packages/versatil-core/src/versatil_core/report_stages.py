"""The stages in which a report is measured; each returns the report with what it found."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from versatil_core.audit import audit
from versatil_core.backend import BasePT2EBackend
from versatil_core.compile import CompiledModel
from versatil_core.compile import compile as compile_int8
from versatil_core.environment_report import environment_of
from versatil_core.exactness import check_exactness
from versatil_core.exactness_report import OpExactness
from versatil_core.export import ModelInputs
from versatil_core.int8_islands import joined_layers
from versatil_core.layer_accuracy import GraphErrors, graph_errors
from versatil_core.layer_report import LayerAccuracy, LayerReport
from versatil_core.lower import lower, lowered_copy
from versatil_core.model_accuracy import measure_metric, output_errors
from versatil_core.progress import StageProgress
from versatil_core.recorded_values import ValueRecorder, copies_of
from versatil_core.report_request import ReportRequest
from versatil_core.report_result import Accuracy, MetricResult, Report, Verdict, VerdictCode
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
        recorder.run(*copies_of(work.calls[0].leaves))
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
        inputs = calls[0].kwargs or calls[0].args
        exactness = check_exactness(work.reference, lowered, inputs, float_model=work.float_model)
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
            is_exact=exactness.is_exact,
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
    return found
