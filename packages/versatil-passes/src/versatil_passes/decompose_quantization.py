"""Write the quantization ops that a lowering left as plain arithmetic."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

aten, prims = torch.ops.aten, torch.ops.prims


class DecomposeQuantization:
    """Replace quantize, dequantize and choose_qparams ops by the arithmetic that they stand for.

    ::

        before: dequantize_per_tensor(q, scale, zero_point, ...)
        after: (q.to(float32) - zero_point) * scale

    For two reasons. What an int8 lowering declined must stay float: Inductor's and torchao's patterns look for these
    ops, fuse around them by rules of their own (they ignore a quant range narrower than the dtype, and add residuals
    in place), and would do so behind the audit's back. They do not recognise the arithmetic, and Inductor fuses it
    like any other. And Inductor's own ``choose_qparams`` differs from the operator's eager definition: it does not
    widen the range to include zero, so that an all-positive tensor gets another scale, and values beyond it
    (torch 2.13: a linear after ReLU and mean is 27 dB from its reference).

    A weight's dequantize becomes a constant when the graph is frozen.

    Requires: runs after :class:`Int8Lowering`, which reads the ops.
    Guarantees: results equal to those of the ops run eagerly, to the bit.
    """

    runs_after = ("QuantLiftUp", "Int8Lowering")

    def __call__(self, graph: Graph) -> int:
        """Rewrite ``graph`` in place.

        Args:
            graph: Any FX graph.

        Returns:
            The number of ops that were replaced.
        """
        rewrites = _rewrites()
        nodes = [
            node for node in graph.nodes if node.op == "call_function" and node.target in rewrites
        ]
        for node in nodes:
            with graph.inserting_before(node):
                result = rewrites[node.target](graph, *node.args, **node.kwargs)
            for old, new in _results_of(node, result):
                new.meta = dict(old.meta)
                old.replace_all_uses_with(new)
                graph.erase_node(old)
            if isinstance(result, tuple):
                graph.erase_node(node)
        return len(nodes)

    def uuid(self) -> str:
        """Identity for compile caches: this pass has no options."""
        return "versatil_passes.DecomposeQuantization/1"


def _rewrites() -> dict[Any, Callable[..., Any]]:
    qd = torch.ops.quantized_decomposed
    if not hasattr(qd, "quantize_per_tensor"):
        return {}  # nothing in this process has defined the ops, so no graph can hold them
    return {
        qd.quantize_per_tensor.default: _quantize,
        qd.quantize_per_tensor.tensor: _quantize,
        qd.quantize_per_channel.default: _quantize_per_channel,
        qd.dequantize_per_tensor.default: _dequantize,
        qd.dequantize_per_tensor.tensor: _dequantize,
        qd.dequantize_per_channel.default: _dequantize_per_channel,
        qd.choose_qparams.tensor: _choose_qparams,
    }


def _results_of(node: Node, result: Node | tuple[Node, ...]) -> list[tuple[Node, Node]]:
    """Which new node stands for which old one: for several results, the old ones are ``getitem`` nodes."""
    if isinstance(result, Node):
        return [(node, result)]
    getitems = [user for user in node.users if user.target is operator.getitem]
    return [(getitem, result[getitem.args[1]]) for getitem in getitems]  # type: ignore[index]


def _quantize(
    graph: Graph,
    x: Node,
    scale: Any,
    zero_point: Any,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Node:
    if isinstance(scale, Node):  # the inverse is rounded to float32 once, as that of a number is
        inverse: Any = graph.call_function(
            aten.reciprocal.default, (_to(graph, scale, torch.float64),)
        )
        inverse = _to(graph, inverse, torch.float32)
    else:
        inverse = 1.0 / scale
    steps = graph.call_function(aten.mul.Tensor, (_to(graph, x, torch.float32), inverse))
    return _to(graph, _rounded(graph, steps, zero_point, quant_min, quant_max), dtype)


def _quantize_per_channel(
    graph: Graph,
    x: Node,
    scales: Node,
    zero_points: Node,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Node:
    y = graph.call_function(aten.transpose.int, (_to(graph, x, torch.float32), axis, -1))
    inverse = graph.call_function(aten.reciprocal.default, (scales,))
    steps = graph.call_function(aten.mul.Tensor, (y, inverse))
    y = _to(graph, _rounded(graph, steps, zero_points, quant_min, quant_max), dtype)
    return graph.call_function(aten.transpose.int, (y, axis, -1))


def _rounded(graph: Graph, steps: Node, zero_point: Any, quant_min: int, quant_max: int) -> Node:
    y = graph.call_function(aten.round.default, (steps,))
    y = graph.call_function(aten.add.Tensor, (y, zero_point))
    return graph.call_function(aten.clamp.default, (y, quant_min, quant_max))


def _dequantize(
    graph: Graph,
    q: Node,
    scale: Any,
    zero_point: Any,
    _quant_min: int,
    _quant_max: int,
    _dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Node:
    result_dtype = out_dtype or torch.float32
    y = graph.call_function(aten.sub.Tensor, (_to(graph, q, result_dtype), zero_point))
    factor = _to(graph, scale, torch.float32) if isinstance(scale, Node) else scale
    return _to(graph, graph.call_function(aten.mul.Tensor, (y, factor)), result_dtype)


def _dequantize_per_channel(
    graph: Graph,
    q: Node,
    scales: Node,
    zero_points: Node | None,
    axis: int,
    _quant_min: int,
    _quant_max: int,
    _dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Node:
    y = graph.call_function(aten.transpose.int, (_to(graph, q, torch.float32), axis, -1))
    if zero_points is not None:
        y = graph.call_function(aten.sub.Tensor, (y, zero_points))
    y = graph.call_function(aten.mul.Tensor, (y, scales))
    y = _to(graph, y, out_dtype or torch.float32)
    return graph.call_function(aten.transpose.int, (y, axis, -1))


def _choose_qparams(
    graph: Graph, x: Node, quant_min: int, quant_max: int, eps: float, _dtype: torch.dtype
) -> tuple[Node, Node]:
    """Scale, float64, and zero_point, int64, of one element each, from the range of ``x`` widened to include zero.

    ``scale = max((high - low) / (quant_max - quant_min), eps)``, ``zero_point = quant_min - round(low / scale)``.
    """
    low = graph.call_function(
        aten.clamp.default, (graph.call_function(aten.amin.default, (x,)), None, 0.0)
    )
    high = graph.call_function(
        aten.clamp.default, (graph.call_function(aten.amax.default, (x,)), 0.0, None)
    )
    span = graph.call_function(aten.sub.Tensor, (high, low))
    scale = graph.call_function(aten.div.Tensor, (span, float(quant_max - quant_min)))
    scale = _to(graph, scale, torch.float32)  # of half-precision values: from here on in float32
    scale = graph.call_function(aten.clamp.default, (scale, eps, None))
    steps = graph.call_function(
        aten.round.default, (graph.call_function(aten.div.Tensor, (low, scale)),)
    )
    zero_point = graph.call_function(
        aten.add.Tensor, (graph.call_function(aten.neg.default, (steps,)), quant_min)
    )
    zero_point = graph.call_function(aten.clamp.default, (zero_point, quant_min, quant_max))
    zero_point = _to(graph, zero_point, torch.int64)
    return _one_element(graph, _to(graph, scale, torch.float64)), _one_element(graph, zero_point)


def _to(graph: Graph, value: Node, dtype: torch.dtype) -> Node:
    return graph.call_function(prims.convert_element_type.default, (value, dtype))


def _one_element(graph: Graph, value: Node) -> Node:
    return graph.call_function(aten.reshape.default, (value, [1]))
