"""Which int8 layers hang together: one's result is the next one's input, with no float between."""

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from versatil_passes import LoweredOp, LoweringRecord

_INT8 = frozenset({torch.int8, torch.uint8})


def joined_layers(lowered: GraphModule, record: LoweringRecord) -> frozenset[str]:
    """Find the layers whose input comes from another layer as int8.

    Args:
        lowered: From :func:`versatil_core.lower.lowered_copy`.
        record: What it lowered.

    Returns:
        Nodes, by their names in the reference.
    """
    layers = {op.replaces[-1]: op for op in record.lowered}
    found = set()
    for node in lowered.graph.nodes:
        layer = layers.get(node.meta.get("replaces", ""))
        if layer is not None and _reads_only_layers(node, layers):
            found.add(layer.node)
    return frozenset(found)


def _reads_only_layers(node: Node, layers: Mapping[str, LoweredOp]) -> bool:
    """Whether the input of a layer comes from layers that write int8, and from nothing else."""
    pending, seen = node.all_input_nodes[:1], set[Node]()
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        layer = layers.get(source.meta.get("replaces", ""))
        if layer is not None:
            if layer.output_dtype not in _INT8:
                return False
            continue
        inputs = _tensors_read(source)
        if not inputs or str(source.target).startswith("quantized_decomposed."):
            return False
        pending.extend(inputs)
    return True


def _tensors_read(node: Node) -> list[Node]:
    """What int8 comes from: each part of a concatenation, else the first input; the others are sizes."""
    parts = node.args[0] if node.args else None
    if isinstance(parts, (list, tuple)):
        return [part for part in parts if isinstance(part, Node)]
    return node.all_input_nodes[:1]
