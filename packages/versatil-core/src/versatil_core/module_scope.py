"""From which submodule of the float model a node of an exported graph comes."""

from torch.fx import Node

from versatil_core.targets import is_inside
from versatil_passes.graph_queries import module_paths_of


def is_node_inside(node: Node, module_path: str) -> bool:
    """Whether a node was recorded while ``module_path``, or something in it, was running.

    Containers that are not called themselves, such as ``ModuleList``, contain what their
    members record.

    Args:
        node: A node of a graph from ``torch.export``, strict or not.
        module_path: Dotted name as in ``named_modules()``; ``""`` is the whole model.
    """
    return not module_path or any(is_inside(path, module_path) for path in module_paths_of(node))
