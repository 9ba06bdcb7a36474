import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx import Graph, GraphModule, Node

from versatil_passes import QuantLiftUp

aten, qd = torch.ops.aten, torch.ops.quantized_decomposed
PARAMS = (0.05, 120, 0, 255, torch.uint8)


def quantize(x: Tensor) -> Tensor:
    result: Tensor = qd.quantize_per_tensor.default(x, *PARAMS)
    return result


def _names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op.startswith("call")]


def _views_of_aten(x: Tensor) -> Tensor:
    x = aten.view.default(aten.relu.default(x), [2, 3, 4, 2])
    x = aten.permute.default(x, [0, 2, 1, 3])
    x = aten.unsqueeze.default(aten.slice.Tensor(x, 1, 0, 3), 0)
    return quantize(aten.expand.default(x, [5, 2, 3, 3, 2]))


def _functions(x: Tensor) -> Tensor:
    x = torch.reshape(torch.relu(x), (2, 3, 8))
    x = torch.unsqueeze(torch.permute(x, (0, 2, 1)), 1)
    return quantize(torch.flatten(torch.squeeze(torch.transpose(x, 2, 3), 1), 1))


def _methods(x: Tensor) -> Tensor:
    x = x.relu().view(2, 3, 8).permute(0, 2, 1).unsqueeze(1)
    return quantize(x.transpose(2, 3).contiguous().squeeze(1).flatten(1).expand(2, 24))


@pytest.mark.parametrize("function", [_views_of_aten, _functions, _methods])
def test_a_quantize_moves_to_its_producer(function: Callable[[Tensor], Tensor]) -> None:
    module = fx.symbolic_trace(function)
    x = torch.randn(2, 24)
    expected = module(x)
    quantized = module.graph.find_nodes(op="call_function", target=qd.quantize_per_tensor.default)[
        0
    ]

    moved = QuantLiftUp()(module.graph)

    module.graph.lint()
    module.recompile()
    assert moved == 1
    assert quantized.prev.name.startswith("relu")
    assert quantized.args[0] is quantized.prev
    assert torch.equal(module(x), expected)


def test_names_and_meta_are_kept_and_values_follow() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return qd.dequantize_per_tensor(quantize(x.relu().view(4, 6).t()), *PARAMS)

    module = torch.export.export(Model(), (torch.randn(2, 12),)).module()
    assert isinstance(module, GraphModule)
    before = {node.name: dict(node.meta) for node in module.graph.nodes}

    assert QuantLiftUp()(module.graph) == 1

    nodes = {node.name: node for node in module.graph.nodes}
    assert nodes.keys() == before.keys()
    for name, node in nodes.items():
        assert {key: value for key, value in node.meta.items() if key != "val"} == {
            key: value for key, value in before[name].items() if key != "val"
        }
    values = {name: node.meta.get("val") for name, node in nodes.items()}
    expected = {
        "quantize_per_tensor_default": ((2, 12), torch.uint8),
        "view": ((4, 6), torch.uint8),
        "t": ((6, 4), torch.uint8),
    }
    found = {
        name: (tuple(value.shape), value.dtype)
        for name, value in values.items()
        if isinstance(value, Tensor) and value.dtype is torch.uint8
    }
    assert {name.replace("_default", ""): value for name, value in found.items()} == {
        name.replace("_default", ""): value for name, value in expected.items()
    }


def test_a_second_run_changes_nothing() -> None:
    graph = fx.symbolic_trace(_methods).graph
    assert QuantLiftUp()(graph) == 1
    names = _names(graph)
    assert QuantLiftUp()(graph) == 0
    assert _names(graph) == names


def test_it_stops_below_a_view_with_two_readers() -> None:
    def function(x: Tensor) -> Any:
        shared = x.relu().view(4, 6)
        return quantize(shared.t()), shared.sum()

    graph = fx.symbolic_trace(function).graph
    assert QuantLiftUp()(graph) == 1
    names = _names(graph)
    assert names.index("view") < names.index("quantize_per_tensor_default") < names.index("t")


def test_two_quantizes_of_one_view_stay() -> None:
    def function(x: Tensor) -> Any:
        view = x.relu().view(4, 6)
        return quantize(view), quantize(view)

    assert QuantLiftUp()(fx.symbolic_trace(function).graph) == 0


def test_two_quantizes_move_each_on_its_own() -> None:
    def function(x: Tensor) -> Any:
        x = x.relu()
        return quantize(x.view(4, 6)), quantize(x.t())

    module = fx.symbolic_trace(function)
    x = torch.randn(2, 12)
    expected = module(x)
    assert QuantLiftUp()(module.graph) == 2
    module.recompile()
    assert all(torch.equal(a, b) for a, b in zip(module(x), expected, strict=True))


def _per_channel(x: Tensor) -> Tensor:
    scales, zero_points = torch.ones(12), torch.zeros(12, dtype=torch.int64)
    params = (scales, zero_points, 0, -128, 127, torch.int8)
    result: Tensor = qd.quantize_per_channel.default(x.relu().t(), *params)
    return result


def _dynamic(x: Tensor) -> Tensor:
    x = x.relu().t()
    scale, zero_point = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    params = (scale, zero_point, 0, 255, torch.uint8)
    result: Tensor = qd.quantize_per_tensor.tensor(x, *params)
    return result


def _reinterpreted(x: Tensor) -> Tensor:
    return quantize(x.view(torch.int32).view(torch.float32))


def _reinterpreted_aten(x: Tensor) -> Tensor:
    return quantize(aten.view.dtype(aten.view.dtype(x, torch.int32), torch.float32))


def _not_a_view(x: Tensor) -> Tensor:
    return quantize(x.relu())


def _written_between(x: Tensor) -> Tensor:
    x = x.relu()
    view = x.view(4, 6)
    x.add_(1)
    return quantize(view)


def _result_put_between(x: Tensor) -> Tensor:
    x = x.relu()
    view = x.view(4, 6)
    torch.mul(x, 2, out=x)
    return quantize(view)


def _item_set_between(x: Tensor) -> Tensor:
    x = x.relu()
    view = x.view(4, 6)
    x[0] = 3
    return quantize(view)


@pytest.mark.parametrize(
    "function",
    [
        _per_channel,
        _dynamic,
        _reinterpreted,
        _reinterpreted_aten,
        _not_a_view,
        _written_between,
        _result_put_between,
        _item_set_between,
    ],
)
def test_what_does_not_move(function: Callable[[Tensor], Tensor]) -> None:
    module = _traced(function)
    x = torch.randn(2, 12)
    expected = module(x.clone())
    names = _names(module.graph)

    assert QuantLiftUp()(module.graph) == 0

    assert _names(module.graph) == names
    module.recompile()
    assert torch.equal(module(x.clone()), expected)


def _traced(function: Callable[[Tensor], Tensor]) -> GraphModule:
    if function is not _item_set_between:
        return fx.symbolic_trace(function)
    graph = Graph()  # a proxy refuses item assignment; Dynamo's graphs have it
    x = graph.call_method("relu", (graph.placeholder("x"),))
    view = graph.call_method("view", (x, 4, 6))
    graph.call_function(operator.setitem, (x, 0, 3))
    graph.output(graph.call_function(qd.quantize_per_tensor.default, (view, *PARAMS)))
    return GraphModule(torch.nn.Module(), graph)


def test_a_write_above_the_views_does_not_stop_it() -> None:
    def function(x: Tensor) -> Tensor:
        return quantize(x.relu().add_(1).view(4, 6))

    assert QuantLiftUp()(fx.symbolic_trace(function).graph) == 1


def test_the_uuid_is_stable() -> None:
    assert QuantLiftUp().uuid() == QuantLiftUp().uuid()
    assert isinstance(QuantLiftUp().uuid(), str)


@st.composite
def _view_chains(draw: st.DrawFn) -> list[tuple[str, tuple[Any, ...]]]:
    """Methods and arguments that can be called one after another on a tensor of shape (2, 3, 4)."""
    shape = [2, 3, 4]
    chain: list[tuple[str, tuple[Any, ...]]] = []
    for _ in range(draw(st.integers(1, 6))):
        name = draw(
            st.sampled_from(
                ["permute", "transpose", "reshape", "unsqueeze", "flatten", "contiguous"]
            )
        )
        args: tuple[Any, ...] = ()
        if name == "permute":
            args = tuple(draw(st.permutations(range(len(shape)))))
        elif name == "transpose":
            args = (draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(shape) - 1)))
        elif name == "unsqueeze":
            args = (draw(st.integers(0, len(shape))),)
        elif name == "reshape":
            args = tuple(draw(st.sampled_from([(24,), (4, 6), (2, 12), (3, 2, 4), (1, 24)])))
        chain.append((name, args))
        shape = list(getattr(torch.empty(shape), name)(*args).shape)
    return chain


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chain=_view_chains(), seed=st.integers(0, 99))
def test_random_views_give_equal_bits(chain: list[tuple[str, tuple[Any, ...]]], seed: int) -> None:
    graph = Graph()
    node: Node = graph.call_method("relu", (graph.placeholder("x"),))
    for name, args in chain:
        node = graph.call_method(name, (node, *args))
    graph.output(graph.call_function(qd.quantize_per_tensor.default, (node, *PARAMS)))
    module = GraphModule(torch.nn.Module(), graph)
    x = 4 * torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    expected = module(x)

    assert QuantLiftUp()(module.graph) == 1

    module.graph.lint()
    module.recompile()
    assert torch.equal(module(x), expected)
    names = [str(node.target) for node in module.graph.nodes if node.op != "output"]
    assert "quantize_per_tensor" in names[2]
