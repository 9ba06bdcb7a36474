"""Move a quantize above the view-like ops in front of it, next to the op that produced the value."""

import torch
from torch.fx import Graph, Node

from versatil_passes.graph_queries import (
    is_mutating,
    is_view_like,
    nodes_between,
    set_value,
    value_of,
)


class QuantLiftUp:
    """Move per-tensor quantizes above view-like ops.

    ::

        before:  producer -> view -> permute -> quantize -> dequantize -> linear
        after:   producer -> quantize -> view -> permute -> dequantize -> linear

    A per-tensor quantize treats every element alike, so it commutes with ops that only move elements. Next to its
    producer it can become the int8 output of that producer's kernel; the views then move a quarter of the bytes.

    Requires: a graph of aten overloads, functions or methods, in topological order.
    Guarantees: equal results, to the bit; node names and ``meta`` are kept; a second run changes nothing.

    It stops below a view with a second reader, and where an op that writes to a tensor stands in between. A
    per-channel quantize never moves (a permute would move its axis), nor does a dynamic one (its scale is computed
    from the value below the views).

    Example:
        >>> from torch.fx import symbolic_trace
        >>> graph = symbolic_trace(lambda x: x.relu().view(4)).graph
        >>> QuantLiftUp()(graph)
        0
    """

    def __call__(self, graph: Graph) -> int:
        """Rewrite ``graph`` in place.

        Args:
            graph: Any FX graph.

        Returns:
            The number of quantizes that moved.
        """
        quantized_decomposed = torch.ops.quantized_decomposed
        if not hasattr(quantized_decomposed, "quantize_per_tensor"):
            return 0  # nothing in this process has defined the op, so no graph can hold it
        quantizes = graph.find_nodes(
            op="call_function", target=quantized_decomposed.quantize_per_tensor.default, sort=True
        )
        return sum(_lift(node) for node in quantizes)

    def uuid(self) -> str:
        """Identity for compile caches: this pass has no options."""
        return "versatil_passes.QuantLiftUp/1"


def _lift(quantize: Node) -> bool:
    views = _movable_views(quantize)
    if not views:
        return False
    producer = views[-1].args[0]
    assert isinstance(producer, Node)
    first_view, last_view = views[-1], views[0]
    quantize.replace_all_uses_with(last_view)
    quantize.update_arg(0, producer)
    first_view.replace_input_with(producer, quantize)
    first_view.prepend(quantize)
    _update_values(quantize, producer, views)
    return True


def _movable_views(quantize: Node) -> list[Node]:
    """The views that the quantize can cross, nearest first."""
    views: list[Node] = []
    below, above = quantize, quantize.args[0]
    while isinstance(above, Node) and is_view_like(above) and len(above.users) == 1:
        if any(is_mutating(node) for node in nodes_between(above, below)):
            break
        views.append(above)
        below, above = above, above.args[0]
    return views


def _update_values(quantize: Node, producer: Node, views: list[Node]) -> None:
    """Shapes stay what they were for the views; the quantize takes its producer's, and int8 flows through the views."""
    dtype = quantize.args[5] if len(quantize.args) > 5 else quantize.kwargs.get("dtype")
    if not isinstance(dtype, torch.dtype):
        return
    for node, source in ((quantize, producer), *((view, view) for view in views)):
        value = value_of(source)
        if value is not None:
            set_value(node, torch.empty_like(value, dtype=dtype))
