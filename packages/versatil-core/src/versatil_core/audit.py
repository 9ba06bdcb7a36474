"""Say of every layer whether it runs as int8, on which kernel, or why not."""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.fx import GraphModule

from versatil_core.backend import BasePT2EBackend
from versatil_core.lower import lowered_copy
from versatil_passes import DeclinedOp, LoweredOp


@dataclass(frozen=True)
class LayerAudit:
    """One layer of the model.

    Attributes:
        module_path: Dotted path as in ``named_modules()``; ``""`` where the graph does not say.
        op: ``"linear"``, ``"conv2d"``, ``"embedding"`` and so on.
        node: Its node in the reference's graph.
        is_int8: Whether an int8 kernel runs it.
        kernel: That kernel; ``None`` for a float layer.
        post_ops: What the kernel also does, such as ``("add", "relu")``.
        output_dtype: Dtype the kernel writes, such as ``"uint8"``; ``None`` for a float layer.
        reason: Why the layer stays float; ``None`` for an int8 layer.
    """

    module_path: str
    op: str
    node: str
    is_int8: bool
    kernel: str | None
    post_ops: tuple[str, ...]
    output_dtype: str | None
    reason: str | None


@dataclass(frozen=True)
class Audit:
    """What runs as int8, what does not, and why; ``print`` it for a table.

    Attributes:
        backend: The backend's name.
        layers: Every layer that multiplies by weights, or matrices together, in the order in which they run.
    """

    backend: str
    layers: tuple[LayerAudit, ...]

    @property
    def int8_count(self) -> int:
        """How many layers run as int8."""
        return sum(layer.is_int8 for layer in self.layers)

    @property
    def float_layers(self) -> tuple[LayerAudit, ...]:
        """The layers that stay float."""
        return tuple(layer for layer in self.layers if not layer.is_int8)

    def to_dict(self) -> dict[str, Any]:
        """The audit as JSON values."""
        return {
            "backend": self.backend,
            "int8_count": self.int8_count,
            "layer_count": len(self.layers),
            "layers": [asdict(layer) for layer in self.layers],
        }

    def __str__(self) -> str:
        """A table as text, 100 columns wide."""
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=100, no_color=True).print(self)
        return buffer.getvalue().rstrip()

    def __rich__(self) -> Any:
        """The same table for a rich console."""
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
                Text(_what(layer)),
            )
        return table


def audit(reference: GraphModule, backend: BasePT2EBackend) -> Audit:
    """Say what ``backend`` would run as int8, without compiling anything; works on every machine.

    Args:
        reference: What :func:`versatil_core.quantize` or :func:`versatil_core.load` returned.
        backend: The hardware in question.

    Returns:
        One entry for each linear, convolution, matrix product, embedding and recurrent layer.

    Raises:
        LoweringError: ``reference`` is no graph module, or is lowered already.
    """
    _, record = lowered_copy(reference, backend)
    order = {node.name: position for position, node in enumerate(reference.graph.nodes)}
    ops: Sequence[LoweredOp | DeclinedOp] = sorted(
        (*record.lowered, *record.declined), key=lambda op: order[op.node]
    )
    return Audit(backend.name, tuple(_layer(op) for op in ops))


def _layer(op: LoweredOp | DeclinedOp) -> LayerAudit:
    if isinstance(op, DeclinedOp):
        return LayerAudit(op.module_path, op.op, op.node, False, None, (), None, op.reason)
    output_dtype = str(op.output_dtype).removeprefix("torch.")
    return LayerAudit(
        op.module_path, op.op, op.node, True, op.kernel, op.post_ops, output_dtype, None
    )


def _what(layer: LayerAudit) -> str:
    if layer.reason is not None:
        return layer.reason
    return f"{' + '.join((layer.op, *layer.post_ops))} -> {layer.output_dtype}"
