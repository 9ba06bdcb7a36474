"""From which submodule of the float model a node of an exported graph comes."""

from torch.fx import Node

from versatil_core.targets import QuantizationTarget, is_any_inside
from versatil_passes.float_layers import FLOAT_LAYERS
from versatil_passes.graph_queries import module_paths_of


def is_node_inside(node: Node, module_path: str) -> bool:
    """Whether a node was recorded while ``module_path``, or something in it, was running.

    Containers that are not called themselves, such as ``ModuleList``, contain what their
    members record.

    Args:
        node: A node of a graph from ``torch.export``, strict or not.
        module_path: Dotted name as in ``named_modules()``, or a pattern; ``""`` is the whole model.
    """
    return is_any_inside(module_paths_of(node), [module_path])


def is_node_selected(node: Node, target: QuantizationTarget) -> bool:
    """Whether a target quantizes a node.

    Args:
        node: A node of a graph from ``torch.export``, strict or not.
        target: What is quantized.
    """
    operator = FLOAT_LAYERS.get(node.target) if node.op == "call_function" else None
    return target.selects(module_paths_of(node), operator)
