"""Keep what a graph says about memory layout true, where kernels write another one.

The int8 convolution kernels write channels last. Values do not depend on that, but views, strides and a few ops do.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from versatil_passes.float_layers import FLOAT_LAYERS
from versatil_passes.graph_queries import is_view_like, is_written, value_of
from versatil_passes.int8_ops import is_int8_op

aten = torch.ops.aten

_READS_LAYOUT = frozenset(
    {
        aten.as_strided.default,
        aten.as_strided_.default,
        aten.as_strided_copy.default,
        aten.view_as_complex.default,
        aten.view.dtype,
    }
)


def is_layout_read(node: Node) -> bool:
    """Whether an op between ``node`` and the next layers computes something else for another memory layout.

    That is ``as_strided`` and its like, or a view that is written to: it would have to become a copy, and the write
    would go unnoticed.
    """
    seen: set[Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user in seen or user.target in FLOAT_LAYERS or is_int8_op(user):
            continue
        seen.add(user)
        if user.target in _READS_LAYOUT or (user.target is aten.view.default and is_written(user)):
            return True
        pending.extend(user.users)
    return False


def let_views_copy(graph: Graph) -> None:
    """Make each view a reshape, which copies where memory is laid out otherwise.

    Where somebody writes to that memory a copy would go unnoticed; there the view stays.
    """
    for view in graph.find_nodes(op="call_function", target=aten.view.default):
        owner = view
        while isinstance(owner, Node) and is_view_like(owner):
            owner = owner.args[0]
        if not is_written(owner):
            view.target = aten.reshape.default


def keep_output_layouts(graph: Graph) -> None:
    """Make contiguous what the graph returns, where it was contiguous before the lowering."""
    output = next(iter(graph.find_nodes(op="output")))

    def contiguous(result: Node) -> Any:
        value = value_of(result)
        if (
            result.op != "call_function"
            or value is None
            or value.dim() < 3
            or not value.is_contiguous()
        ):
            return result
        with graph.inserting_before(output):
            kept = graph.call_function(aten.contiguous.default, (result,))
        kept.meta = {
            name: value for name, value in result.meta.items() if name in {"val", "example_value"}
        }
        return kept

    output.args = torch.fx.node.map_arg(output.args, contiguous)
