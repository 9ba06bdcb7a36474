"""From which submodule of the float model a node of an exported graph comes."""

import re

from torch.fx import Node

from versatil_core.targets import is_inside


def is_node_inside(node: Node, module_path: str) -> bool:
    """Whether a node was recorded while ``module_path``, or something in it, was running.

    Containers that are not called themselves, such as ``ModuleList``, contain what their
    members record.

    Args:
        node: A node of a graph from ``torch.export``, strict or not.
        module_path: Dotted name as in ``named_modules()``; ``""`` is the whole model.
    """
    return not module_path or any(is_inside(path, module_path) for path in _running_modules(node))


def _running_modules(node: Node) -> list[str]:
    """Return the paths of the modules that were running, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [_normalized(str(entry[0])) for entry in stack.values()]


def _normalized(path: str) -> str:
    """Bring what torch's export modes write to the form of ``named_modules()``.

    Strict mode has written ``L['self'].encoder.0``, ``L['self']._modules['encoder'][0]`` and,
    where the model itself is a ``Sequential``, ``getattr(getattr(L['fn'], '0'), '1')``. A second
    call of one module is marked ``@1``.
    """
    path = re.sub(r"@\d+", "", path)
    innermost = re.compile(r"getattr\(([^()]*), '([^']+)'\)")
    while innermost.search(path):
        path = innermost.sub(r"\1.\2", path)
    path = re.sub(r"^L\['\w+'\]", "", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    return path.replace("._modules.", ".").strip(".")
