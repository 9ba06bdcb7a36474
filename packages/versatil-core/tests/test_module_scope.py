"""A node is placed in the module that made it, however the graph was exported."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.fx import Node

from versatil_core.module_scope import is_node_inside


def node(*paths: str) -> Node:
    stack: dict[str, Any] = {str(i): (path, object) for i, path in enumerate(paths)}
    return cast("Node", SimpleNamespace(meta={"nn_module_stack": stack}))


@pytest.mark.parametrize(
    "path",
    [
        "encoder.0.linear",
        "L['self'].encoder.0.linear",
        "L['self'].encoder[0].linear",
        "L['self']._modules['encoder']._modules['0'].linear",
        "getattr(L['fn'].encoder, '0').linear",
        "getattr(getattr(getattr(L['fn'], 'encoder'), '0'), 'linear')",
        "encoder.0.linear@1",
    ],
)
def test_spellings(path: str) -> None:
    for inside in ("", "encoder", "encoder.0", "encoder.0.linear"):
        assert is_node_inside(node("", path), inside), inside
    for outside in ("enc", "encoder.1", "linear", "encoder.0.linear.x"):
        assert not is_node_inside(node("", path), outside), outside


def test_a_node_without_a_stack_is_in_the_whole_model_only() -> None:
    bare = cast("Node", SimpleNamespace(meta={}))

    assert is_node_inside(bare, "")
    assert not is_node_inside(bare, "encoder")


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_that_is_called_twice(*, strict: bool) -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})

        def forward(self, x: torch.Tensor) -> Any:
            return self.parts["a"](self.parts["a"](x))

    graph = torch.export.export(Twice(), (torch.randn(1, 2),), strict=strict).module().graph

    linears = [n for n in graph.nodes if n.target is torch.ops.aten.linear.default]
    assert len(linears) == 2
    assert all(is_node_inside(linear, "parts.a") for linear in linears)
    assert all(is_node_inside(linear, "parts") for linear in linears)
