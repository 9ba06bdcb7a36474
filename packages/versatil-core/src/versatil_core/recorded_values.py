"""Runs a graph and keeps what each node computed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from versatil_core._torch_compat import unflatten_like
from versatil_core.export import ModelInputs


class ValueRecorder(Interpreter):
    """Runs a graph and keeps the value of every node, as it was when the node ran."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        """Keep the value, too."""
        value = super().run_node(n)
        self.values[n.name] = value.clone() if isinstance(value, torch.Tensor) else value
        return value


def shares_memory(node: Node) -> bool:
    """Whether the result is (a view of) an argument, so that writing to one must be seen in the other."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(
        result.alias_info is not None for result in target._schema.returns
    )


def own_inputs(call: ModelInputs) -> ModelInputs:
    """Copy the inputs of a call, since a model may write to them."""
    return ModelInputs(*unflatten_like(copies_of(call.leaves), call.args, call.kwargs))


def copies_of(inputs: Sequence[Any]) -> list[Any]:
    """Copy tensors, so that a model may write to its inputs."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
