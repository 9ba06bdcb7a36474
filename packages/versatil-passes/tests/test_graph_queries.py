import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from versatil_passes.graph_queries import (
    constant_of,
    erase_unread,
    is_mutating,
    is_view_like,
    is_written,
    module_path_of,
    module_paths_of,
    node_order,
    nodes_between,
    only_user,
    set_value,
    value_of,
)

aten, qd = torch.ops.aten, torch.ops.quantized_decomposed


def _call(op: str, target: Any, *args: Any, **kwargs: Any) -> Node:
    graph = Graph()
    return graph.create_node(op, target, (graph.placeholder("x"), *args), kwargs)


VIEWS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.view.default, ([4],)),
    (aten.permute.default, ([1, 0],)),
    (aten.expand.default, ([3, 4],)),
    (aten.slice.Tensor, (0, 1, 2)),
    (aten.detach.default, ()),
    (torch.flatten, (1,)),
    ("view", (2, 2)),
    ("transpose", (0, 1)),
    ("contiguous", ()),
]
NO_VIEWS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.view.dtype, (torch.int8,)),
    (aten.relu.default, ()),
    (aten.add.Tensor, (1,)),
    (aten.cat.default, ()),
    ("view", (torch.int8,)),
    ("relu", ()),
    ("unsqueeze_", (0,)),
]


@pytest.mark.parametrize(("target", "args"), VIEWS)
def test_views(target: Any, args: Any) -> None:
    op = "call_method" if isinstance(target, str) else "call_function"
    assert is_view_like(_call(op, target, *args))


@pytest.mark.parametrize(("target", "args"), NO_VIEWS)
def test_what_is_no_view(target: Any, args: Any) -> None:
    op = "call_method" if isinstance(target, str) else "call_function"
    assert not is_view_like(_call(op, target, *args))


def test_a_view_by_keyword_dtype_is_none() -> None:
    assert not is_view_like(_call("call_method", "view", dtype=torch.int8))


def test_a_module_or_input_with_the_name_of_a_view_is_none() -> None:
    graph = Graph()
    assert not is_view_like(graph.placeholder("view"))
    assert not is_view_like(graph.call_module("view", (graph.placeholder("x"),)))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.add_.Tensor, True),
        (aten.copy_.default, True),
        (aten.relu_.default, True),
        (aten.add.out, True),
        (aten.add.Tensor, False),
        (torch.relu_, True),
        (torch.relu, False),
        (operator.setitem, True),
        (operator.iadd, True),
        (operator.imatmul, True),
        (operator.ipow, True),
        (operator.add, False),
        (operator.getitem, False),
        ("add_", True),
        ("add", False),
        ("__add__", False),
        ("__iadd__", True),
        ("__setitem__", True),
    ],
)
def test_mutation(target: Any, *, expected: bool) -> None:
    op = "call_method" if isinstance(target, str) else "call_function"
    assert is_mutating(_call(op, target)) is expected


def test_a_result_put_into_an_argument_is_mutation() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert is_mutating(graph.call_function(torch.add, (x, x), {"out": y}))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.sin().cos(), False),
        (lambda x: x.sin().add_(1), True),
        (lambda x: x.sin().view(4).t().add_(1), True),
        (lambda x: x.sin().cos().add_(1), False),
    ],
)
def test_a_value_is_written_to_itself_or_through_a_view(function: Any, *, expected: bool) -> None:
    graph = symbolic_trace(function).graph
    sin = next(node for node in graph.nodes if node.target == "sin")
    assert is_written(sin) is expected


def test_inputs_and_outputs_do_not_mutate() -> None:
    graph = symbolic_trace(lambda x: x.relu()).graph
    assert not any(is_mutating(node) for node in graph.nodes)


def test_order_and_neighbours() -> None:
    graph = symbolic_trace(lambda x: x.sin().cos() + x).graph
    x, sin, cos, add, output = graph.nodes
    assert list(nodes_between(sin, output)) == [cos, add]
    assert list(nodes_between(sin, cos)) == []
    assert [node_order(graph)[node] for node in (x, add)] == [0, 3]
    assert only_user(sin) is cos
    assert only_user(x) is None
    assert only_user(output) is None


def test_values_under_both_keys() -> None:
    node = _call("call_function", aten.relu.default)
    assert value_of(node) is None
    set_value(node, torch.zeros(2))
    assert "val" in node.meta
    node.meta = {"example_value": torch.zeros(3)}
    set_value(node, torch.zeros(4))
    value = value_of(node)
    assert value is not None
    assert (list(node.meta), tuple(value.shape)) == (["example_value"], (4,))


def test_quantize_and_dequantize_have_the_shape_of_their_argument() -> None:
    """``convert_pt2e`` records no value for them."""
    graph = Graph()
    params = (0.1, 0, 0, 255, torch.uint8)
    x = graph.placeholder("x")
    quantize = graph.call_function(qd.quantize_per_tensor.default, (x, *params))
    dequantize = graph.call_function(qd.dequantize_per_tensor.default, (quantize, *params))
    assert value_of(dequantize) is None
    x.meta["val"] = torch.zeros(2, 3)
    for node, dtype in ((quantize, torch.uint8), (dequantize, torch.float32)):
        value = value_of(node)
        assert value is not None
        assert (value.shape, value.dtype) == ((2, 3), dtype)


def test_constants() -> None:
    root = nn.Module()
    root.inner = nn.Linear(2, 2)
    graph = Graph()
    x = graph.placeholder("x")
    weight, missing, module = (
        graph.create_node("get_attr", name) for name in ("inner.weight", "inner.nothing", "inner")
    )
    full = graph.call_function(aten.full.default, ([1], 0.5), {"dtype": torch.float32})
    graph.output(x)
    graph.owning_module = GraphModule(root, Graph())
    graph.owning_module.inner = root.inner
    constant = constant_of(weight)
    assert constant is not None
    assert not constant.requires_grad
    torch.testing.assert_close(constant, root.inner.weight.detach())
    torch.testing.assert_close(constant_of(full), torch.tensor([0.5]))
    for other in (x, missing, module, None, 0.5):
        assert constant_of(other) is None


@pytest.mark.parametrize(
    ("recorded", "path"),
    [
        ("", ""),
        ("encoder.0", "encoder.0"),
        ("encoder.0@1", "encoder.0"),
        ("L['self'].encoder.0", "encoder.0"),
        ("L['self']", ""),
        ("L['self'].encoder[0].out", "encoder.0.out"),
        ("L['self']._modules['encoder'][0]", "encoder.0"),
        ("getattr(getattr(L['fn'], '0'), '1')", "0.1"),
        ("getattr(L['self'].encoder, 'my layer')", "encoder.my layer"),
        ("L['self']._modules['encoder']", "encoder"),
    ],
)
def test_module_paths(recorded: str, path: str) -> None:
    node = _call("call_function", aten.relu.default)
    node.meta["nn_module_stack"] = {"outer": ("outer", object), "inner": (recorded, object)}
    assert module_path_of(node) == path


def test_all_modules_around_a_node() -> None:
    node = _call("call_function", aten.relu.default)
    node.meta["nn_module_stack"] = {
        name: (path, object) for name, path in (("a", ""), ("b", "encoder"), ("c", "encoder.0@1"))
    }
    assert module_paths_of(node) == ["", "encoder", "encoder.0"]


def test_a_node_without_modules_belongs_to_the_root() -> None:
    assert module_path_of(_call("call_function", aten.relu.default)) == ""


def test_erasing_what_nobody_reads() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    weight, shared = graph.get_attr("weight"), graph.get_attr("shared")
    unread = graph.call_function(aten.add.Tensor, (weight, shared))
    read = graph.call_function(aten.add.Tensor, (x, shared))
    written = graph.call_method("add_", (x, 1))
    graph.output(read)

    erase_unread([unread, read, x, 0.5, unread])

    assert [node for node in graph.nodes if node.op != "output"] == [x, shared, read, written]
