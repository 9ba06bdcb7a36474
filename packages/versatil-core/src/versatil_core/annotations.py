"""Where torchao keeps what a quantizer says of a node, and how that stays true when nodes are replaced."""

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Graph, Node

ANNOTATION = "quantization_annotation"
"""Key in ``node.meta``."""


def rename_inputs(graph: Graph, new: Mapping[Node, Node]) -> None:
    """Let the annotations of a graph name other nodes; torchao looks their inputs up.

    Args:
        graph: Its annotations are replaced; those of other graphs, which may share them, stay.
        new: Node that annotations name -> the one that is in its place.
    """
    for node in graph.nodes:
        annotation = node.meta.get(ANNOTATION)
        if annotation is not None and any(key in new for key in annotation.input_qspec_map):
            specs = {new.get(key, key): spec for key, spec in annotation.input_qspec_map.items()}
            node.meta[ANNOTATION] = replace(annotation, input_qspec_map=specs)
