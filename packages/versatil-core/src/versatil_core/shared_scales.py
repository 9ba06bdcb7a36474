"""Which ops between int8 layers must have the same scale in front and behind, so that int8 passes through them."""

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, SharedQuantizationSpec

from versatil_core.annotations import ANNOTATION
from versatil_passes.commuting_ops import commuting_inputs, is_bound
from versatil_passes.graph_queries import only_user

aten = torch.ops.aten

# Not the same on int8, but near, and worth it: the layer before can write int8, the layer behind read it.
_AVERAGES = frozenset({aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default})


def ops_with_shared_scale(
    candidates: Iterable[Node],
    layers: Collection[Node],
    layer_ends: Collection[Node],
    dtype: torch.dtype,
) -> dict[Node, list[Node]]:
    """Find the ops between int8 layers that need one scale for what they read and write.

    Each begins at the result of an int8 layer and leads to the input of another. Where nobody reads what is between, or
    the last result, as float, nothing is needed: a quantize behind the last op is moved to the layer
    (:class:`~versatil_passes.QuantizeLayerOutputs`), and sees the range of what is left at the end, which may be
    smaller, such as behind a relu.

    Args:
        candidates: Nodes that may be quantized, in graph order.
        layers: The int8 layers.
        layer_ends: The last node of what the kernel of each computes.
        dtype: What activations are quantized to.

    Returns:
        The ops, in graph order, with the tensors that each reads.
    """
    nodes = list(candidates)
    int8_only = _read_as_int8_only(nodes, layers, dtype)
    found: dict[Node, list[Node]] = {}
    moved: set[Node] = set()
    for node in nodes:
        inputs = commuting_inputs(node, dtype)
        is_average = node.target in _AVERAGES
        if is_average:
            inputs = node.all_input_nodes[:1]
        if inputs is None or not all(each in found or each in layer_ends for each in inputs):
            continue
        is_moved = node in int8_only and all(
            only_user(each) is node and (each in moved or each in layer_ends) for each in inputs
        )
        if is_bound(node) and not is_moved:
            continue  # its result has a smaller range, and gets a scale of its own
        found[node] = inputs
        if is_moved:
            moved.add(node)
    needed: set[Node] = set()
    for node in reversed(found):
        if any(_reads_int8(user, node, layers) for user in node.users) or any(
            reader in needed for reader in _readers(node)
        ):
            needed.add(node)
    return {node: inputs for node, inputs in found.items() if node in needed - moved}


def share_scale(node: Node, inputs: list[Node], activation: Any) -> None:
    """Annotate an op so that all that it reads and what it writes have one scale.

    Args:
        node: From :func:`ops_with_shared_scale`.
        inputs: What it reads.
        activation: The recipe for the first of these.
    """
    reader = node
    if node.target is operator.getitem:  # of a chunk or a split, whose result is no tensor
        reader = node.all_input_nodes[0]
    first = inputs[0]
    shared = SharedQuantizationSpec((first, reader))
    specs: dict[Node, Any] = {**dict.fromkeys(inputs, shared), first: activation}
    if reader is not node:
        reader.meta[ANNOTATION] = QuantizationAnnotation(input_qspec_map=specs, _annotated=True)
        specs = {}
    node.meta[ANNOTATION] = QuantizationAnnotation(
        input_qspec_map=specs, output_qspec=shared, _annotated=True
    )


def _read_as_int8_only(
    nodes: Collection[Node], layers: Collection[Node], dtype: torch.dtype
) -> set[Node]:
    """The commuting ops whose results nobody reads as float, so that a quantize may come before them."""
    found: set[Node] = set()
    shared: set[Node] = set()  # read int8 wherever what is before them is int8
    for node in reversed(list(nodes)):
        parts = {each for each in node.users if _is_split(each)}
        readers = [*(set(node.users) - parts), *(each for part in parts for each in part.users)]
        as_int8 = [
            reader in found or reader in shared or _reads_int8(reader, node, layers)
            for reader in readers
        ]
        is_commuting = commuting_inputs(node, dtype) is not None
        if is_commuting and all(as_int8):
            found.add(node)
        if any(as_int8) and (node.target in _AVERAGES or (is_commuting and _is_one_to_one(node))):
            shared.add(node)
    return found


def _is_one_to_one(node: Node) -> bool:
    """Whether an op reads one tensor, and its result needs no scale of its own."""
    return len(node.all_input_nodes) == 1 and not is_bound(node)


def _is_split(node: Node) -> bool:
    """Whether a node's result is several tensors, each of which is read by itself."""
    return bool(node.users) and all(user.target is operator.getitem for user in node.users)


def _readers(node: Node) -> list[Node]:
    """The nodes that read a tensor; instead of a chunk or split, its parts."""
    parts = [part for user in node.users for part in user.users if part.target is operator.getitem]
    return [*node.users, *parts]


def _reads_int8(user: Node, node: Node, layers: Collection[Node]) -> bool:
    """Whether ``user`` is an int8 layer that reads ``node`` as its input, or an addition that reads it as int8."""
    if user in layers:
        return user.args[0] is node
    annotation = user.meta.get(ANNOTATION)
    return annotation is not None and annotation.input_qspec_map.get(node) is not None
