"""Say of every layer whether it runs as int8, on which kernel, or why not."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from torch.fx import GraphModule

from versatil_core.backend import BasePT2EBackend
from versatil_core.float_dtype import as_compiled
from versatil_core.lower import lowered_copy
from versatil_core.reference_info import TargetInfo, find_reference_info
from versatil_core.saturation import saturation_advice
from versatil_core.targets import is_any_inside, is_selected
from versatil_core.versions import check_versions
from versatil_passes import DeclinedOp, LoweredOp, LoweringRecord, LoweringRules
from versatil_passes.graph_queries import module_paths_of
from versatil_passes.lowering_record import NOT_ANNOTATED


@dataclass(frozen=True)
class LayerAudit:
    """One layer of the model.

    Attributes:
        module_path: Dotted path as in ``named_modules()``; ``""`` where the graph does not say.
        op: ``"linear"``, ``"conv2d"``, ``"embedding"`` and so on.
        node: Its node in the reference's graph.
        is_int8: Whether an int8 kernel runs it or, of an embedding, whether its table stays int8.
        kernel: That kernel, such as ``"onednn.qlinear_pointwise"``; ``None`` for a float layer.
        post_ops: What the kernel also does, such as ``("add", "relu")``.
        output_dtype: Dtype the kernel writes, such as ``"uint8"``; ``None`` for a float layer.
        reason: Why the layer stays float; ``None`` for an int8 layer.
        may_saturate: Whether inputs exist for which the kernel's sums saturate on this CPU.
        pair_sum: The largest magnitude that two neighbouring int8 weights of the same sign add up to; ``None`` for a
            float layer, and on a CPU whose kernels never saturate.
        pair_limit: The largest such sum that is safe; ``None`` likewise.
        kernel_class: Name of the implementation that runs it, such as ``"lowp_gemm:acl"``; empty where oneDNN decides.
        columns_bytes: Memory for each image, in bytes, of a convolution that runs as a product of matrices.
    """

    module_path: str
    op: str
    node: str
    is_int8: bool
    kernel: str | None
    post_ops: tuple[str, ...]
    output_dtype: str | None
    reason: str | None
    may_saturate: bool = False
    pair_sum: int | None = None
    pair_limit: int | None = None
    kernel_class: str = ""
    columns_bytes: int = 0


@dataclass(frozen=True)
class Audit:
    """What runs as int8, what does not, and why; ``print`` it for a table.

    Attributes:
        backend: The backend's name.
        layers: Every layer that multiplies by weights, or matrices together, in the order in which they run.
        notes: What else there is to know: why the model was quantized as it was, and what may go wrong here.
    """

    backend: str
    layers: tuple[LayerAudit, ...]
    notes: tuple[str, ...] = ()

    @property
    def int8_count(self) -> int:
        """How many layers run as int8."""
        return sum(layer.is_int8 for layer in self.layers)

    @property
    def kernel_call_count(self) -> int:
        """How many layers run on a kernel of oneDNN's; looking up int8 rows takes none."""
        return sum((layer.kernel or "").startswith("onednn.") for layer in self.layers)

    @property
    def float_layers(self) -> tuple[LayerAudit, ...]:
        """The layers that stay float."""
        return tuple(layer for layer in self.layers if not layer.is_int8)

    @property
    def saturating_layers(self) -> tuple[LayerAudit, ...]:
        """The int8 layers whose sums may saturate on this CPU."""
        return tuple(layer for layer in self.layers if layer.may_saturate)

    def to_dict(self) -> dict[str, Any]:
        """The audit as JSON values."""
        return {
            "backend": self.backend,
            "int8_count": self.int8_count,
            "layer_count": len(self.layers),
            "may_saturate_count": len(self.saturating_layers),
            "notes": list(self.notes),
            "layers": [asdict(layer) for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild what :meth:`to_dict` returned.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is not what it should be.
        """
        layers = [{**layer, "post_ops": tuple(layer["post_ops"])} for layer in values["layers"]]
        return cls(
            backend=str(values["backend"]),
            layers=tuple(LayerAudit(**layer) for layer in layers),
            notes=tuple(map(str, values["notes"])),
        )

    def __str__(self) -> str:
        """A table as text, 100 columns wide, with the notes below."""
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=100, no_color=True).print(self)
        return buffer.getvalue().rstrip()

    def __rich__(self) -> Any:
        """The same for a rich console."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"{self.int8_count} of {len(self.layers)} layers int8 ({self.backend})"
        table = Table(title=title, title_justify="left", show_edge=False)
        table.add_column("layer", overflow="fold")
        table.add_column("op", no_wrap=True)
        table.add_column("runs as", no_wrap=True)
        table.add_column("fused, output; or the reason", overflow="fold")
        for layer in self.layers:
            table.add_row(
                Text(layer.module_path or layer.node),  # as it is: a name may look like markup
                layer.op,
                "int8" if layer.is_int8 else "float",
                Text(_what(layer), style="yellow" if layer.may_saturate else ""),
            )
        return Group(table, *(Text(note) for note in self.notes))


def audit(reference: GraphModule, backend: BasePT2EBackend) -> Audit:
    """Say what ``backend`` would run as int8, without compiling anything; works on every machine.

    Args:
        reference: What :func:`versatil_core.quantize` or :func:`versatil_core.load` returned.
        backend: The hardware in question.

    Returns:
        One entry for each linear, convolution, matrix product, embedding and recurrent layer.

    Raises:
        LoweringError: ``reference`` is no graph module, or is lowered already.
        UnsupportedVersionError: torch and torchao are not a pair that is tested.
    """
    check_versions()
    reference = as_compiled(reference, backend)
    rules = backend.lowering_rules
    _, record = lowered_copy(reference, rules)
    order = {node.name: position for position, node in enumerate(reference.graph.nodes)}
    layers = sorted(audited_layers(record), key=lambda layer: order[layer.node])
    layers = _with_target_reasons(reference, layers)
    return Audit(backend.name, tuple(layers), tuple(_notes(reference, layers, rules)))


def audited_layers(record: LoweringRecord) -> tuple[LayerAudit, ...]:
    """Return one entry for each operator that a lowering dealt with: the int8 ones first."""
    ops: tuple[LoweredOp | DeclinedOp, ...] = (*record.lowered, *record.declined)
    return tuple(map(_layer, ops))


def _with_target_reasons(reference: GraphModule, layers: Sequence[LayerAudit]) -> list[LayerAudit]:
    """Say of layers that nothing asked to quantize whether that is what the targets wanted."""
    info = find_reference_info(reference)
    targets = () if info is None else info.targets
    nodes = {node.name: node for node in reference.graph.nodes}
    reasons = (
        unselected_reason(targets, module_paths_of(nodes[layer.node]), layer.op)
        if (layer.reason or "").endswith(NOT_ANNOTATED)
        else ""
        for layer in layers
    )
    return [
        replace(layer, reason=reason) if reason else layer
        for layer, reason in zip(layers, reasons, strict=True)
    ]


def unselected_reason(
    targets: Sequence[TargetInfo], module_paths: Sequence[str], operator: str
) -> str:
    """Say why no target selects an operator; ``""`` if one does, or if there is none.

    Args:
        targets: Of a reference.
        module_paths: The operator's module and those around it.
        operator: Its name in an audit.
    """
    if not targets or any(is_selected(target, module_paths, operator) for target in targets):
        return ""
    around = [target for target in targets if is_any_inside(module_paths, [target.module_path])]
    if not around:
        names = " or ".join(repr(target.module_path) for target in targets)
        return f"it is outside what was quantized: {names}"
    [target, *_] = around
    where = repr(target.module_path) if target.module_path else "the whole model"
    if is_any_inside(module_paths, target.exclude):
        return f"it is excluded from what was quantized: {where}"
    return f"only {', '.join(target.operators)} of {where} was quantized"


def _notes(
    reference: GraphModule, layers: Sequence[LayerAudit], rules: LoweringRules
) -> Iterator[str]:
    info = find_reference_info(reference)
    for target in () if info is None else info.targets:
        where = f" in {target.module_path}" if target.module_path else ""
        for option, reason in target.reasons.items():
            yield f"quantized with {option}={target.options.get(option)!r}{where}: {reason}"
    count = sum(layer.may_saturate for layer in layers)
    if count:
        subject = "1 layer" if count == 1 else f"{count} layers"
        yield f"{subject} may saturate here: {saturation_advice(rules)}"


def _layer(op: LoweredOp | DeclinedOp) -> LayerAudit:
    if isinstance(op, DeclinedOp):
        return LayerAudit(op.module_path, op.op, op.node, False, None, (), None, op.reason)
    output_dtype = str(op.output_dtype).removeprefix("torch.")
    return LayerAudit(
        module_path=op.module_path,
        op=op.op,
        node=op.node,
        is_int8=True,
        kernel=op.kernel,
        post_ops=op.post_ops,
        output_dtype=output_dtype,
        reason=None,
        may_saturate=op.may_saturate,
        pair_sum=op.pair_sum,
        pair_limit=op.pair_limit,
        kernel_class=op.kernel_class,
        columns_bytes=op.columns_bytes,
    )


def _what(layer: LayerAudit) -> str:
    if layer.reason is not None:
        return layer.reason
    what = f"{' + '.join((layer.op, *layer.post_ops))} -> {layer.output_dtype}"
    if layer.kernel_class:
        what += f", {layer.kernel_class}"
    if layer.columns_bytes:
        what += f", {layer.columns_bytes / 1e3:.0f} kB of columns an image"
    if layer.may_saturate:
        what += f"; may saturate here: a pair of weights adds up to {layer.pair_sum}, {layer.pair_limit} is safe"
    return what
