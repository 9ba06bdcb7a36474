"""An int8 operator under construction, and its way into the graph."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from versatil_passes.graph_queries import (
    erase_unread,
    is_mutating,
    module_path_of,
    nodes_between,
    only_user,
    set_value,
    value_of,
)
from versatil_passes.int8_ops import Int8Call
from versatil_passes.lowering_record import LoweredOp

aten = torch.ops.aten


@dataclass(frozen=True)
class Int8Chain:
    """An operator under construction: what it computes so far, and the nodes that this replaces."""

    call: Int8Call
    nodes: tuple[Node, ...]

    @property
    def last(self) -> Node:
        """The node whose value is the operator's result."""
        return self.nodes[-1]

    def extended(self, node: Node, call: Int8Call) -> "Int8Chain":
        """The chain with one more node, which ``call`` computes as well."""
        return Int8Chain(call, (*self.nodes, node))

    def next_op(self, targets: set[Any] | None = None) -> Node | None:
        """The only reader of the last node, unless something is written to between the two."""
        return next_op(self.last, targets)

    def post_op_names(self) -> tuple[str, ...]:
        """What follows the layer itself, for the record."""
        added = () if self.call.other is None else ("add",)
        return added if self.call.post_op == "none" else (*added, self.call.post_op)


def next_op(node: Node, targets: set[Any] | None = None) -> Node | None:
    """The only reader of ``node``, if it is one of ``targets``, unless something is written to between the two."""
    reader = only_user(node)
    if (
        reader is None
        or reader.op != "call_function"
        or (targets is not None and reader.target not in targets)
    ):
        return None
    if any(is_mutating(between) for between in nodes_between(node, reader)):
        return None
    return reader


def emit_int8_op(chain: Int8Chain, op: str, input_quant_max: int) -> LoweredOp:
    """Put the neutral operator in the place of the nodes that it replaces.

    Args:
        chain: What it computes, and those nodes.
        op: ``"linear"``, ``"conv1d"``, ``"conv2d"`` or ``"conv3d"``.
        input_quant_max: ``quant_max`` of the activation's quantize.

    Returns:
        The record of it.
    """
    call, last = chain.call, chain.last
    with last.graph.inserting_before(last):
        if isinstance(call.w_scale, float):
            scale = last.graph.call_function(
                aten.full.default, ([1], call.w_scale), {"dtype": torch.float32}
            )
            call = replace(call, w_scale=scale)
        node = last.graph.call_function(call.target, call.args())
    names = tuple(member.name for member in chain.nodes)
    record = LoweredOp(
        node=chain.nodes[0].name,
        module_path=module_path_of(chain.nodes[0]),
        op=op,
        kernel="onednn.qlinear_pointwise" if op == "linear" else "onednn.qconv_pointwise",
        post_ops=chain.post_op_names(),
        output_dtype=call.output_dtype,
        input_quant_max=input_quant_max,
        is_dynamic=call.is_dynamic,
        replaces=names,
    )
    node.meta = {**last.meta, "replaces": last.name, "lowered_as": str(record)}
    value = value_of(last)
    if value is not None:
        set_value(node, value)  # an earlier residual addition may ask for this shape
    last.replace_all_uses_with(node)
    inputs = [
        node for member in chain.nodes for node in member.all_input_nodes if node not in chain.nodes
    ]
    for member in reversed(chain.nodes):
        member.graph.erase_node(member)
    erase_unread(node for node in inputs if is_dequantize(node))
    return record


def is_dequantize(node: Node) -> bool:
    """Whether ``node`` is one of the ``quantized_decomposed`` dequantize ops."""
    return node.op == "call_function" and str(node.target).startswith(
        "quantized_decomposed.dequantize"
    )
