"""Write the quantize and dequantize ops that are left as plain arithmetic."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

aten, prims = torch.ops.aten, torch.ops.prims


class DecomposeQuantization:
    """Replace per-tensor and per-channel quantize and dequantize ops by the arithmetic that they stand for.

    ::

        before:  dequantize_per_tensor(q, scale, zero_point, ...)
        after:   (q.to(float32) - zero_point) * scale

    What an int8 lowering declined must stay float. Inductor's and torchao's patterns look for quantize and dequantize
    ops, fuse around them by rules of their own (they ignore a quant range narrower than the dtype, and add residuals
    in place), and would do so behind the audit's back. They do not recognise the arithmetic, and Inductor fuses it
    like any other. A weight's dequantize becomes a constant when the graph is frozen.

    Requires: runs after :class:`Int8Lowering`, which reads the ops.
    Guarantees: results equal to those of the ops, to the bit.
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
        nodes = [node for node in graph.nodes if node.op == "call_function" and node.target in rewrites]
        for node in nodes:
            with graph.inserting_before(node):
                result = rewrites[node.target](graph, *node.args)
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return len(nodes)

    def uuid(self) -> str:
        """Identity for compile caches: this pass has no options."""
        return "versatil_passes.DecomposeQuantization/1"


def _rewrites() -> dict[Any, Callable[..., Node]]:
    qd = torch.ops.quantized_decomposed
    if not hasattr(qd, "quantize_per_tensor"):
        return {}  # nothing in this process has defined the ops, so no graph can hold them
    return {
        qd.quantize_per_tensor.default: _quantize,
        qd.quantize_per_tensor.tensor: _quantize,
        qd.dequantize_per_tensor.default: _dequantize,
        qd.dequantize_per_tensor.tensor: _dequantize,
        qd.dequantize_per_channel.default: _dequantize_per_channel,
    }


def _quantize(
    graph: Graph, x: Node, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: torch.dtype
) -> Node:
    inverse = 1.0 / scale if isinstance(scale, float) else graph.call_function(aten.reciprocal.default, (scale,))
    y = graph.call_function(aten.round.default, (graph.call_function(aten.mul.Tensor, (x, inverse)),))
    y = graph.call_function(aten.add.Tensor, (y, zero_point))
    y = graph.call_function(aten.clamp.default, (y, quant_min, quant_max))
    return graph.call_function(prims.convert_element_type.default, (y, dtype))


def _dequantize(
    graph: Graph, q: Node, scale: Any, zero_point: Any, _quant_min: int, _quant_max: int, _dtype: torch.dtype
) -> Node:
    y = graph.call_function(prims.convert_element_type.default, (q, torch.float32))
    y = graph.call_function(aten.sub.Tensor, (y, zero_point))
    return graph.call_function(aten.mul.Tensor, (y, scale))


def _dequantize_per_channel(
    graph: Graph,
    q: Node,
    scales: Node,
    zero_points: Node | None,
    axis: int,
    _quant_min: int,
    _quant_max: int,
    _dtype: torch.dtype,
) -> Node:
    y = graph.call_function(prims.convert_element_type.default, (q, torch.float32))
    y = graph.call_function(aten.transpose.int, (y, axis, -1))
    if zero_points is not None:
        y = graph.call_function(aten.sub.Tensor, (y, zero_points))
    y = graph.call_function(aten.mul.Tensor, (y, scales))
    return graph.call_function(aten.transpose.int, (y, axis, -1))
