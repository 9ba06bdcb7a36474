"""Decide whether a tensor's memory may be reused for a result: nobody may be able to see that it changed."""

from typing import Any

import torch
from torch.fx import Node

from versatil_passes._torch_compat import same_shape, storage_id
from versatil_passes.graph_queries import node_order, value_of

aten, prims = torch.ops.aten, torch.ops.prims

_MAY_SHARE_MEMORY = frozenset(
    {
        # Inductor turns these into views, or lets their inputs live inside their output's memory.
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.contiguous.default,
        aten.cat.default,
        aten.stack.default,
        prims.convert_element_type.default,
        aten._to_copy.default,  # noqa: SLF001 - its public name
        aten.clone.default,
    }
)


def is_overwritable(other: Any, reader: Node) -> bool:
    """Whether ``reader``, the last to read ``other``, may write its own result there.

    Holds only for a value that an op of a *functional* graph computed into memory of its own, that no other node's
    memory overlaps, that ``reader`` reads once, that every other reader has read before, and that has the shape,
    dtype and memory layout of the result. Graph inputs, constants and their views are never overwritable.

    Args:
        other: The operand in question; anything but a node is not overwritable.
        reader: The node that would write.

    Returns:
        ``False`` wherever one of these is not certain.
    """
    if not isinstance(other, Node) or not _computes_new_memory(other):
        return False
    value, result = value_of(other), value_of(reader)
    if value is None or result is None or not _has_same_layout(value, result):
        return False
    if list(reader.args).count(other) != 1:
        return False
    order = node_order(reader.graph)
    readers = [user for user in other.users if user is not reader]
    if not all(order[user] < order[reader] and _computes_new_memory(user) for user in readers):
        return False
    storage = storage_id(value)
    return all(node is other or _storage_of(node) != storage for node in reader.graph.nodes)


def _computes_new_memory(node: Node) -> bool:
    """Whether the node's result is a tensor of its own, neither a view nor something Inductor may make one."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if any(result.alias_info is not None for result in node.target._schema.returns):
        return False
    return node.target not in _MAY_SHARE_MEMORY or _changes_dtype(node)


def _changes_dtype(node: Node) -> bool:
    """A result of another dtype cannot live in its argument's memory."""
    value = value_of(node)
    arguments = [value_of(argument) for argument in node.all_input_nodes]
    return value is not None and all(
        argument is not None and argument.dtype != value.dtype for argument in arguments
    )


def _has_same_layout(value: torch.Tensor, result: torch.Tensor) -> bool:
    is_4d = result.dim() == 4
    memory_format = torch.channels_last if is_4d else torch.contiguous_format
    return (
        value.dtype == result.dtype
        and same_shape(value, result)
        and value.is_contiguous(memory_format=memory_format)
        and result.is_contiguous(memory_format=memory_format)
    )


def _storage_of(node: Node) -> int | None:
    value = value_of(node)
    return None if value is None else storage_id(value)
