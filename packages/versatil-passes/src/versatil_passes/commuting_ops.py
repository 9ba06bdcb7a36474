"""Ops that commute with a per-tensor quantize, ``quantize(op(x)) == op'(quantize(x))``, and their int8 forms.

Quantizing never reverses the order of two values. So it commutes with every op that only moves, repeats or drops
elements, that takes the larger of several, or that bounds them; a constant that the op brings in (a bound, a padding
value) becomes its step. An average is none of these: it lies between two steps and is rounded differently.
"""

import ctypes
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from versatil_passes.float_layers import post_op_of
from versatil_passes.graph_queries import (
    arguments_of,
    is_mutating,
    is_view_like,
    is_written,
    node_order,
)

aten = torch.ops.aten

_JOINS = frozenset({aten.cat.default, aten.stack.default})
_PARTS = frozenset(
    {
        aten.chunk.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.tensor_split.sections,
    }
)
# Without pixel_unshuffle: on channels last it takes Inductor (2.13) 2.5 times as long on int8 as on float.
_MOVES = frozenset(
    {
        aten.channel_shuffle.default,
        aten.clone.default,
        aten.mT.default,
        aten.movedim.int,
        aten.narrow.default,
        aten.pixel_shuffle.default,
        aten.swapaxes.default,
        aten.unflatten.int,
    }
)
# torch has no kernel for int8, only for uint8.
_UINT8_MOVES = frozenset(
    {
        aten.upsample_nearest1d.vec,
        aten.upsample_nearest2d.vec,
        aten.upsample_nearest3d.vec,
        aten._upsample_nearest_exact1d.vec,  # noqa: SLF001 - its public name
        aten._upsample_nearest_exact2d.vec,  # noqa: SLF001 - likewise
        aten._upsample_nearest_exact3d.vec,  # noqa: SLF001 - likewise
    }
)
# Without adaptive max pooling: torch has no kernel for integers, so that a lowered graph could not run eagerly.
_MAX_POOLS = frozenset({aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default})
# Beyond, and for dilated windows, Inductor calls torch's kernel, which refuses integers in channels last.
_MAX_POOL_WINDOW = 25
_IS_INT8 = "is_int8_pool"
_NORMAL_SCALES = (2.0**-100, 2.0**100)


@dataclass(frozen=True)
class Quantization:
    """The parameters of a static per-tensor quantize or dequantize."""

    scale: float
    zero_point: int
    quant_min: int
    quant_max: int
    dtype: torch.dtype

    @classmethod
    def of(cls, node: Node) -> "Quantization | None":
        """Those of a node; ``None`` where it is another op, or leaves float32."""
        qd = torch.ops.quantized_decomposed
        targets = (qd.quantize_per_tensor.default, qd.dequantize_per_tensor.default)
        if node.op != "call_function" or node.target not in targets:
            return None
        _, scale, zero_point, low, high, dtype, *rest = arguments_of(node).values()
        if rest not in ([], [None], [torch.float32]):
            return None
        return cls(scale, zero_point, low, high, dtype)

    @property
    def is_invertible(self) -> bool:
        """Whether quantizing gives back what was dequantized: no value may leave float32's normal range."""
        return _NORMAL_SCALES[0] < self.scale < _NORMAL_SCALES[1]

    def step_of(self, value: float) -> int:
        """What the quantize makes of a float32 tensor's element ``value``."""
        if math.isinf(value):
            return self.quant_max if value > 0 else self.quant_min
        # A product of two float32 is exact in a Python float, so that it is rounded once.
        steps = _float32(_float32(value) * _float32(1.0 / self.scale))
        if math.isinf(steps):
            return self.quant_max if steps > 0 else self.quant_min
        return min(max(round(steps) + self.zero_point, self.quant_min), self.quant_max)


@dataclass(frozen=True)
class CommutingChain:
    """What lies between a quantize and where its value comes from.

    Attributes:
        ops: The commuting ops, in graph order; may be empty.
        leaves: The nodes that they read, in graph order.
        is_closed: Whether nobody else reads the ops and the leaves.
    """

    ops: tuple[Node, ...]
    leaves: tuple[Node, ...]
    is_closed: bool


def commuting_inputs(node: Node, dtype: torch.dtype) -> list[Node] | None:
    """The tensors that a commuting op takes its elements from, or ``None`` where ``node`` is no such op.

    Args:
        node: Any node. A ``getitem`` stands for itself and for the chunk or split behind it.
        dtype: What its elements are quantized to.
    """
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        is_part = isinstance(source, Node) and source.target in _PARTS
        return _tensors([source.args[0]]) if is_part else None  # type: ignore[union-attr] # a node
    if node.op == "call_function" and node.target in _JOINS:
        return _tensors(node.args[0]) if node.args else None
    is_known = is_view_like(node) or (
        node.op == "call_function"
        and (
            node.target in _MOVES
            or (node.target in _UINT8_MOVES and dtype is torch.uint8)
            or _is_max_pool(node)
            or _bounds_of(node) is not None
            or _padding_of(node) is not None
            or _is_idle_dropout(node)
        )
    )
    return _tensors(node.args[:1]) if is_known else None


def is_bound(node: Node) -> bool:
    """Whether ``node`` is relu, hardtanh, clamp or the like: its result may have a smaller range."""
    return node.op == "call_function" and _bounds_of(node) is not None


def commuting_chain(
    quantize: Node, params: Quantization, is_leaf: Callable[[Node], bool]
) -> CommutingChain | None:
    """Walk up from a quantize through commuting ops, to where ``is_leaf`` or another kind of op ends the walk.

    Args:
        quantize: A static per-tensor quantize.
        params: Its parameters.
        is_leaf: Ends the walk at a node that would commute itself.

    Returns:
        ``None`` where somebody writes to one of the tensors on the way, so that they may not be left out.
    """
    ops: set[Node] = set()
    leaves: set[Node] = set()
    pending = [quantize.args[0]]
    while pending:
        node = pending.pop()
        assert isinstance(node, Node)
        if node in ops or node in leaves:
            continue
        inputs = None if is_leaf(node) else commuting_inputs(node, params.dtype)
        if inputs is None:
            leaves.add(node)
            continue
        ops.add(node)
        pending.extend(inputs)
    members = ops | {node.args[0] for node in ops if node.target is operator.getitem}
    tensors = [node for node in (*members, *leaves) if isinstance(node, Node)]
    known = {*members, quantize}
    is_closed = all(
        user in known or _is_unread_part(user) for node in tensors for user in node.users
    )
    # A bound in place changes what other readers see, unless there are none.
    is_in_place = any(is_mutating(node) for node in ops)
    is_single_file = is_closed and all(len(node.users) == 1 for node in tensors)
    if not is_single_file and (is_in_place or any(map(is_written, tensors))):
        return None
    order = node_order(quantize.graph)
    return CommutingChain(
        tuple(sorted(ops, key=order.__getitem__)),
        tuple(sorted(leaves, key=order.__getitem__)),
        is_closed,
    )


def int8_form(op: Node, int8: dict[Node, Node], params: Quantization) -> Node:
    """Add the int8 form of a commuting op to its graph, at the insertion point.

    Args:
        op: The op on float.
        int8: The int8 values of its inputs.
        params: How they are quantized.

    Returns:
        Its result; the int8 input itself where the op leaves it as it is.
    """
    if op.op == "call_function" and op.target is operator.getitem:
        return _int8_part(op, int8)
    name = f"{op.name}_int8"
    if op.op == "call_function" and op.target in _JOINS:
        joined = [int8[part] for part in op.args[0]]  # type: ignore[union-attr, index]
        return op.graph.create_node(op.op, op.target, (joined, *op.args[1:]), op.kwargs, name)
    x = int8[op.args[0]]  # type: ignore[index]
    if op.op == "call_function" and _is_max_pool(op):
        return _int8_max_pool(op, x, name)
    if op.op == "call_function" and _is_idle_dropout(op):
        return x
    bounds, padding = (
        (_bounds_of(op), _padding_of(op)) if op.op == "call_function" else (None, None)
    )
    target, args, kwargs = op.target, (x, *op.args[1:]), op.kwargs
    if bounds is not None:
        low, high = (params.step_of(bound) for bound in bounds)
        if (low, high) == (params.quant_min, params.quant_max):
            return x
        target, args, kwargs = aten.clamp.default, (x, low, high), {}
    if padding is not None:
        widths, value = padding
        args, kwargs = (x, widths, "constant", params.step_of(value)), {}
    return op.graph.create_node(op.op, target, args, kwargs, name)


def _int8_part(op: Node, int8: dict[Node, Node]) -> Node:
    """A part of an int8 tensor, by a chunk or split of its own."""
    parts, index = op.args
    assert isinstance(parts, Node)
    source, *sizes = parts.args
    arguments = (int8[source], *sizes)  # type: ignore[index]
    name = f"{parts.name}_int8"
    split = op.graph.create_node(parts.op, parts.target, arguments, parts.kwargs, name)
    return op.graph.create_node(op.op, op.target, (split, index), {}, f"{op.name}_int8")


def let_pools_run_eagerly(graph: torch.fx.Graph) -> None:
    """Put a copy in front of max pools of int8: torch's own kernels refuse integers in channels last.

    Not for a graph that Inductor compiles: its kernels take any layout.
    """
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d.default):
        if _IS_INT8 in node.meta:
            with graph.inserting_before(node):
                copy = graph.call_function(aten.contiguous.default, node.args[:1])
            node.update_arg(0, copy)


def _int8_max_pool(op: Node, x: Node, name: str) -> Node:
    graph = op.graph
    if op.target is aten.max_pool2d.default:
        arguments = (x, *op.args[1:])
        pooled = graph.create_node("call_function", op.target, arguments, op.kwargs, name)
        pooled.meta[_IS_INT8] = True
        return pooled
    if op.target is aten.max_pool3d.default:
        # Inductor of some versions calls torch's kernel, which refuses integers in channels last.
        x = graph.call_function(aten.contiguous.default, (x,))
        return graph.create_node("call_function", op.target, (x, *op.args[1:]), op.kwargs, name)
    # torch's kernel for one dimension takes no integers.
    _, kernel, stride, padding, dilation, ceil_mode = arguments_of(op).values()
    kernel, stride, padding, dilation = (
        [neutral, *_listed(value)]
        for neutral, value in ((1, kernel), (1, stride or kernel), (0, padding), (1, dilation))
    )
    row = graph.call_function(aten.unsqueeze.default, (x, -2))
    arguments = (row, kernel, stride, padding, dilation, ceil_mode)
    pooled = graph.create_node(
        "call_function", aten.max_pool2d.default, arguments, {}, f"{op.name}_row_int8"
    )
    pooled.meta[_IS_INT8] = True
    return graph.create_node("call_function", aten.squeeze.dim, (pooled, -2), {}, name)


def _is_max_pool(node: Node) -> bool:
    if node.target not in _MAX_POOLS:
        return False
    given = arguments_of(node)
    dimensions = {"max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3}[str(node.target).split(".")[1]]
    kernel = _listed(given["kernel_size"])
    window = kernel * dimensions if len(kernel) == 1 else kernel
    return math.prod(window) <= _MAX_POOL_WINDOW and set(_listed(given["dilation"])) == {1}


def _bounds_of(node: Node) -> tuple[float, float] | None:
    """What an op bounds its argument to: ``(0, inf)`` for relu."""
    if node.target is aten.clamp_min.default:
        low: Any = node.args[1]
        is_number = isinstance(low, (int, float)) and not math.isnan(low)
        return (float(low), math.inf) if is_number else None
    name, bounds = post_op_of(node) or ("", ())
    if name == "relu":
        return 0.0, math.inf
    return (bounds[0], bounds[1]) if name == "hardtanh" else None


def _padding_of(node: Node) -> tuple[Any, float] | None:
    """Widths and value of a padding with a constant."""
    if node.target is not aten.pad.default:
        return None
    _, widths, mode, value = arguments_of(node).values()
    value = 0.0 if value is None else value
    is_constant = mode == "constant" and isinstance(value, (int, float)) and not math.isnan(value)
    return (widths, float(value)) if is_constant else None


def _is_idle_dropout(node: Node) -> bool:
    return node.target is aten.dropout.default and node.args[2] is False


def _is_unread_part(node: Node) -> bool:
    return node.target is operator.getitem and not node.users


def _tensors(values: Any) -> list[Node] | None:
    """The values, if each of them is a node."""
    if not isinstance(values, (list, tuple)) or not values:
        return None
    return list(values) if all(isinstance(value, Node) for value in values) else None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _float32(value: float) -> float:
    return ctypes.c_float(value).value
