"""An int8 weight, and its place in a reference."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_qd = torch.ops.quantized_decomposed


@dataclass(frozen=True)
class QuantizedWeight:
    """An int8 weight with one scale for each output channel; its zero_point is 0.

    Attributes:
        values: int8 ``[out_channels, ...]``.
        scale: float32 ``[out_channels]``.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """The weight that the int8 values stand for, float32 ``[out_channels, ...]``."""
        return self.values.to(torch.float32) * along_channels(self.scale, self.values)


def along_channels(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Shape ``[out_channels]`` so that it broadcasts over ``[out_channels, ...]``."""
    return scale.view(-1, *[1] * (weight.dim() - 1))


def put_int8_weight(
    model: GraphModule,
    node: Node,
    weight: QuantizedWeight,
    name: str,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Put an int8 weight and its dequantize in the place of a node.

    Args:
        model: The node's module; gets the weight as buffers.
        node: An observer of the float weight, or an earlier dequantize. It is erased.
        weight: What to put there.
        name: The float weight's name, from which those of the buffers are made.
        out_dtype: What to dequantize to, if not float32.
    """
    zero_point = torch.zeros_like(weight.scale, dtype=torch.int64)
    stem = name.removesuffix("_int8")
    parts = {"int8": weight.values, "scale": weight.scale, "zero_point": zero_point}
    with node.graph.inserting_before(node):
        constants = _constants(model, node.graph, stem, parts)
        dequantize = node.graph.call_function(
            _qd.dequantize_per_channel.default,
            (*constants, 0, -128, 127, torch.int8),
            {} if out_dtype is None else {"out_dtype": out_dtype},
        )
    _replace(node, dequantize)


def put_quantize(
    model: GraphModule, node: Node, scale: torch.Tensor, zero_point: torch.Tensor
) -> None:
    """Put a quantize and a dequantize per output channel in the place of an observer.

    Args:
        model: The node's module; gets scale and zero_point as buffers.
        node: An observer of a float weight. It is erased.
        scale: float32 ``[out_channels]``.
        zero_point: int64 ``[out_channels]``.
    """
    float_weight = node.args[0]
    with node.graph.inserting_before(node):
        parts = {"scale": scale, "zero_point": zero_point}
        constants = _constants(model, node.graph, node.name, parts)
        options: tuple[Any, ...] = (*constants, 0, -128, 127, torch.int8)
        quantize = node.graph.call_function(
            _qd.quantize_per_channel.default, (float_weight, *options)
        )
        dequantize = node.graph.call_function(
            _qd.dequantize_per_channel.default, (quantize, *options)
        )
    _replace(node, dequantize)


def _constants(
    model: GraphModule, graph: Graph, stem: str, parts: Mapping[str, torch.Tensor]
) -> list[Node]:
    stem = stem.replace(".", "_")
    return [
        graph.get_attr(_add_buffer(model, f"{stem}_{part}", value)) for part, value in parts.items()
    ]


def _replace(node: Node, dequantize: Node) -> None:
    if "val" in node.meta:
        dequantize.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(dequantize)
    node.graph.erase_node(node)


def _add_buffer(model: GraphModule, name: str, value: torch.Tensor) -> str:
    """Register a buffer under the name, or the next free one; one that is there and equal serves again."""
    for candidate in itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1))):
        existing = getattr(model, candidate, None)
        if existing is None:
            model.register_buffer(candidate, value)
            return candidate
        if isinstance(existing, torch.Tensor) and _is_same(existing, value):
            return candidate
    raise AssertionError("the names never end")


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)
