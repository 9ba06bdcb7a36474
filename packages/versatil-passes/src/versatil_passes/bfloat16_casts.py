"""Casts between float32 and bfloat16, and the dtypes that a graph notes of its values."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from versatil_passes.bfloat16_constants import Constants
from versatil_passes.graph_queries import constant_of, is_written, value_of
from versatil_passes.int8_chain import is_dequantize

aten = torch.ops.aten
BFLOAT16 = torch.bfloat16


class Casts:
    """The casts of a graph, each value cast once."""

    def __init__(self, graph: Graph) -> None:
        self.constants = Constants(graph)
        self._made: dict[tuple[Node, torch.dtype], Node] = {}

    def of(self, node: Node, dtype: torch.dtype) -> Node:
        """A node with the value of ``node`` in ``dtype``; for a constant, another constant."""
        key = node, dtype
        if key not in self._made:
            constant = constant_of(node) if node.op == "get_attr" else None
            if constant is not None and not _is_state(node):
                self._made[key] = self.constants.cast(node, dtype)
            else:
                self._made[key] = cast_after(node, dtype)
        return self._made[key]


def cast_after(node: Node, dtype: torch.dtype) -> Node:
    """Add a cast right behind ``node``; nobody reads it yet."""
    first = node
    while first.next.op == "placeholder":  # those stay together
        first = first.next
    with node.graph.inserting_after(first):
        cast = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})  # noqa: SLF001 - its public name
    value = value_of(node)
    cast.meta = {key: node.meta[key] for key in ("nn_module_stack",) if key in node.meta}
    if value is not None:
        cast.meta["val"] = value.to(dtype)
    return cast


def compute_in_float32(node: Node) -> None:
    """Put casts around an op that has no bfloat16 kernel."""
    with node.graph.inserting_before(node):
        for argument in node.all_input_nodes:
            if dtype_of(argument) is BFLOAT16:
                wide = node.graph.call_function(
                    aten._to_copy.default,  # noqa: SLF001 - its public name
                    (argument,),
                    {"dtype": torch.float32},
                )
                value = value_of(argument)
                wide.meta = {} if value is None else {"val": value.float()}
                node.replace_input_with(argument, wide)
    targets = [user for user in node.users if user.target is operator.getitem] or [node]
    set_dtype(node, BFLOAT16, torch.float32)
    for target in targets:
        if dtype_of(target) is BFLOAT16 or target is node:
            set_dtype(target, BFLOAT16, torch.float32)
        if dtype_of(target) is torch.float32:
            replace_readers(target, cast_after(target, BFLOAT16), except_for=())


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of a node's value, or ``None`` where it is no tensor or nothing is known."""
    if not isinstance(node, Node):
        return None
    if node.op == "call_function" and is_dequantize(node):
        return node.kwargs.get("out_dtype") or torch.float32  # type: ignore[return-value] # the op's schema
    value = value_of(node)
    if value is None and node.op == "get_attr":
        value = constant_of(node)
    return None if value is None else value.dtype


def is_cast(node: Node, dtype: torch.dtype) -> bool:
    """Whether ``node`` does nothing but bring its argument to ``dtype``."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return False
    if node.target is aten.to.dtype:
        return node.args[1] is dtype
    return node.target is aten._to_copy.default and node.kwargs == {"dtype": dtype}  # noqa: SLF001 - its public name


def set_dtype(node: Node, old: torch.dtype | None, new: torch.dtype) -> None:
    """Note in the value of ``node`` that what was ``old`` is ``new``."""

    def changed(value: Any) -> Any:
        is_old = isinstance(value, torch.Tensor) and value.dtype is old
        return value.to(new) if is_old else value

    for key in ("val", "example_value"):
        if key in node.meta:
            node.meta[key] = map_aggregate(node.meta[key], changed)


def replace_readers(node: Node, other: Node, except_for: Iterable[Node]) -> None:
    """Let all that read ``node`` read ``other``, but ``other`` itself and ``except_for``."""
    kept = {other, *except_for}
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user not in kept)


def _is_state(node: Node) -> bool:
    """Whether the model writes to this constant."""
    same = node.graph.find_nodes(op="get_attr")
    return any(is_written(each) for each in same if each.target == node.target)
