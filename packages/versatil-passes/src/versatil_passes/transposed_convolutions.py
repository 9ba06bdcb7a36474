"""Keep transposed convolutions out of a pass of Inductor that gets them wrong."""

from typing import Any

import torch
from torch.fx import Graph, Node

from versatil_passes.graph_queries import is_view_like

aten = torch.ops.aten

_TRANSPOSED = frozenset(
    {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
)
_BINARY = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}) | {
    aten.add_.Tensor,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.div_.Tensor,
}

# What Inductor drops before it looks.
_DROPPED = frozenset(
    {
        torch.ops.prims.convert_element_type.default,
        aten.to.dtype,
        aten.clone.default,
        aten.contiguous.default,
        aten.alias.default,
        aten.detach.default,
        aten.dropout.default,
        aten.dropout_.default,
    }
)


class KeepTransposedConvolutions:
    """Put a view between a transposed convolution and the arithmetic behind it.

    When it freezes, Inductor multiplies what follows a convolution, such as the ``1/scale`` of a quantize, into
    its weight, along axis 0. A transposed convolution has its output channels on axis 1: where the two sizes differ,
    compiling fails, and where they don't, a factor for each channel would land on the wrong ones (torch 2.9 to 2.15,
    ``torch/_inductor/fx_passes/binary_folding.py``). It does not look behind a view of this kind, which costs nothing
    at run time.

    Requires: runs after :class:`DecomposeQuantization`, which writes such arithmetic.
    Guarantees: results are equal to the bit.
    """

    runs_after = ("DecomposeQuantization",)

    def __call__(self, graph: Graph) -> int:
        """Rewrite ``graph`` in place.

        Args:
            graph: An FX graph of aten operators.

        Returns:
            The number of convolutions that got a view.
        """
        nodes = [
            node
            for node in graph.nodes
            if node.op == "call_function" and node.target in _TRANSPOSED and _is_foldable(node)
        ]
        for node in nodes:
            _put_views_behind(node)
        return len(nodes)

    def uuid(self) -> str:
        """Identity for compile caches: this pass has no options."""
        return "versatil_passes.KeepTransposedConvolutions/1"


def _is_foldable(node: Node) -> bool:
    return any(
        user.target in _BINARY
        or ((is_view_like(user) or user.target in _DROPPED) and _is_foldable(user))
        for user in node.users
    )


def _put_views_behind(node: Node) -> None:
    users = [*node.users]
    with node.graph.inserting_after(node):
        wider = node.graph.call_function(aten.unsqueeze.default, (node, 0))
    with node.graph.inserting_after(wider):
        same = node.graph.call_function(aten.squeeze.dim, (wider, 0))
    same.meta = dict(node.meta)
    value: Any = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        key = "val" if "val" in node.meta else "example_value"
        wider.meta = {**node.meta, key: value.unsqueeze(0)}
    for user in users:
        user.replace_input_with(node, same)
