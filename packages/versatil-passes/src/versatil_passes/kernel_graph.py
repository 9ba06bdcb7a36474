"""What binding a neutral operator to a kernel needs: adding calls to a graph, and constants to its module."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from versatil_passes.graph_queries import value_of

Emit = Callable[..., Any]
"""Calls an operator on values, or adds the call to a graph: ``emit(op, *args)``."""


def call_now(operator: Any, *args: Any) -> Any:
    """The :data:`Emit` that computes."""
    return operator(*args)


def graph_emit(graph: Graph) -> Emit:
    """The :data:`Emit` that adds calls to ``graph``, with the fake value of each where its arguments have one."""

    def emit(operator: Any, *args: Any) -> Node:
        node = graph.call_function(operator, args)
        if all(value_of(arg) is not None for arg in node.all_input_nodes):
            node.meta["val"] = operator(*map_arg(args, value_of))
        return node

    return emit


class GraphConstants:
    """Constants that a graph needs, such as packed weights, each made once and kept by the owning module.

    Args:
        graph: The graph; its module gets the constants as buffers that are not saved.
    """

    def __init__(self, graph: Graph) -> None:
        """Start with none."""
        self._graph = graph
        self._names: dict[Any, str] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], torch.Tensor], like: Node) -> Node:
        """A ``get_attr`` of the constant ``key``, at the graph's insertion point.

        Args:
            key: Equal keys are the same constant; the first element names it.
            make: Makes the constant at its first use.
            like: Lends its fake mode, so that the new node has a fake value too.
        """
        module = self._graph.owning_module
        assert module is not None
        if key not in self._names:
            tensor = make()
            name = f"_{key[0]}_{len(self._names)}"
            while hasattr(module, name):
                name = f"_{name}"
            module.register_buffer(name, tensor, persistent=False)
            self._names[key] = name
        node = self._graph.get_attr(self._names[key])
        fake, tensor = value_of(like), getattr(module, self._names[key])
        if fake is not None:
            node.meta["val"] = fake.new_empty(tensor.shape, dtype=tensor.dtype)
        return node
