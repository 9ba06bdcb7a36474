"""Constants of a graph in another float dtype."""

import torch
from torch.fx import Graph, Node

from versatil_passes.graph_queries import value_of

LARGEST = torch.finfo(torch.bfloat16).max
"""The largest bfloat16; a few float32 are larger, and would become infinite."""


class Constants:
    """Parameters and buffers in another dtype, under their old names where nobody reads the old ones any more.

    Args:
        graph: The graph; its module gets the constants.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._values: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._names: dict[str, str] = {}

    def cast(self, constant: Node, dtype: torch.dtype) -> Node:
        """A ``get_attr`` of the same constant in ``dtype``, right behind ``constant``."""
        owner, attribute = self._owner(str(constant.target))
        value = getattr(owner, attribute)
        key = id(value), dtype  # tied weights stay one tensor
        if key not in self._values:
            self._values[key] = _cast(value, dtype)
        new = f"{attribute}_{str(dtype).removeprefix('torch.')}"
        while hasattr(owner, new) and getattr(owner, new) is not self._values[key]:
            new = f"{new}_"
        if not hasattr(owner, new):
            _set(owner, new, self._values[key])
        name = str(constant.target).removesuffix(attribute) + new
        self._names[name] = str(constant.target)
        with self._graph.inserting_after(constant):
            cast = self._graph.get_attr(name)
        fake = value_of(constant)
        cast.meta = {} if fake is None else {"val": fake.to(dtype)}
        return cast

    def take_names(self) -> None:
        """Drop constants that nobody reads any more, and give their names to those that replaced them."""
        readers: dict[str, list[Node]] = {}
        for node in self._graph.find_nodes(op="get_attr"):
            if node.users:
                readers.setdefault(str(node.target), []).append(node)
            elif str(node.target) in self._names.values():
                self._graph.erase_node(node)
        for new, old in self._names.items():
            if old in readers:
                continue
            owner, attribute = self._owner(new)
            value = getattr(owner, attribute)
            delattr(owner, attribute)
            _, old_attribute = self._owner(old)
            delattr(owner, old_attribute)
            _set(owner, old_attribute, value)
            for node in readers.get(new, []):
                node.target = old
        self._names.clear()

    def _owner(self, name: str) -> tuple[torch.nn.Module, str]:
        module = self._graph.owning_module
        assert module is not None
        path, _, attribute = name.rpartition(".")
        return module.get_submodule(path), attribute


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    exact = value.detach()
    if dtype is torch.bfloat16:
        exact = torch.where(exact.isinf(), exact, exact.clamp(-LARGEST, LARGEST))
    cast = exact.to(dtype)
    is_parameter = isinstance(value, torch.nn.Parameter)
    return torch.nn.Parameter(cast, requires_grad=False) if is_parameter else cast


def _set(owner: torch.nn.Module, attribute: str, value: torch.Tensor) -> None:
    if isinstance(value, torch.nn.Parameter):
        owner.register_parameter(attribute, value)
    else:
        owner.register_buffer(attribute, value)
