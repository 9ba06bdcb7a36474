from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from versatil_passes.kernel_graph import GraphConstants, call_now, graph_emit

aten = torch.ops.aten


@pytest.fixture
def module(build: Any) -> GraphModule:
    """A graph ``relu(x + bias)``, with values."""
    function = build.function(lambda b, x: torch.relu(x + b.bias), bias=torch.ones(3))
    exported: GraphModule = build.export(function, torch.randn(2, 3))
    return exported


def test_calling_now_computes() -> None:
    assert call_now(aten.add.Tensor, torch.ones(2), 3).tolist() == [4, 4]


def test_an_emitted_call_has_its_value(module: GraphModule) -> None:
    relu = module.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with module.graph.inserting_after(relu):
        node = graph_emit(module.graph)(aten.transpose.int, relu, 0, 1)

    assert node.args == (relu, 0, 1)
    assert (node.meta["val"].shape, node.meta["val"].dtype) == ((3, 2), torch.float32)


def test_values_inside_a_list_count(module: GraphModule) -> None:
    relu = module.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with module.graph.inserting_after(relu):
        node = graph_emit(module.graph)(aten.cat.default, [relu, relu], 1)
    assert node.meta["val"].shape == (2, 6)


def test_without_values_of_its_arguments_a_call_has_none() -> None:
    """Dynamo's graphs and those of ``convert_pt2e`` have nodes without."""
    traced = symbolic_trace(torch.nn.ReLU())
    (x,) = traced.graph.find_nodes(op="placeholder")
    with traced.graph.inserting_after(x):
        node = graph_emit(traced.graph)(aten.add.Tensor, x, 1)
    assert "val" not in node.meta


def _constant(constants: GraphConstants, module: GraphModule, key: Any, value: Tensor) -> Any:
    like = module.graph.find_nodes(op="placeholder")[0]
    with module.graph.inserting_before(like):
        return constants.get(key, lambda: value, like)


def test_a_constant_is_made_once_and_not_saved(module: GraphModule) -> None:
    constants, saved = GraphConstants(module.graph), set(module.state_dict())

    first = _constant(constants, module, ("weight", "a"), torch.ones(3))
    again = _constant(constants, module, ("weight", "a"), torch.zeros(3))
    other = _constant(constants, module, ("weight", "b"), torch.zeros(5, dtype=torch.int8))

    assert first.target == again.target != other.target
    assert module.get_buffer(first.target).tolist() == [1, 1, 1]
    assert set(module.state_dict()) == saved
    value = other.meta["val"]
    assert (type(value).__name__, value.shape, value.dtype) == ("FakeTensor", (5,), torch.int8)


def test_a_name_that_is_taken_is_left_alone(module: GraphModule) -> None:
    """Another pass, or an earlier run, may have made one."""
    first = _constant(GraphConstants(module.graph), module, ("weight",), torch.ones(3))
    second = _constant(GraphConstants(module.graph), module, ("weight",), torch.zeros(3))

    assert first.target != second.target
    assert module.get_buffer(first.target).tolist() == [1, 1, 1]
    assert module.get_buffer(second.target).tolist() == [0, 0, 0]


def test_without_a_value_to_go_by_a_constant_has_none(module: GraphModule) -> None:
    del module.graph.find_nodes(op="placeholder")[0].meta["val"]
    node = _constant(GraphConstants(module.graph), module, ("ones",), torch.ones(1))
    assert "val" not in node.meta
