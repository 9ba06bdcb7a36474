"""Which int8 layers hang together: one's result is the next one's input, with no float between."""

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from versatil_passes import LoweringRecord

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
        if layer is None:
            continue
        sources = (layers.get(each.meta.get("replaces", "")) for each in _int8_path(node))
        source = next((op for op in sources if op is not None), None)
        if source is not None and source.output_dtype in _INT8:
            found.add(layer.node)
    return frozenset(found)


def _int8_path(node: Node) -> Iterator[Node]:
    """The first input of a node, the first input of that, and so on, up to where float begins."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if str(node.target).startswith("quantized_decomposed."):
            return
        yield node
