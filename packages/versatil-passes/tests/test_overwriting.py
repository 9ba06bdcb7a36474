from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from versatil_passes.overwriting import is_overwritable

aten, prims = torch.ops.aten, torch.ops.prims


def _answer(
    function: Callable[..., Any], *inputs: Tensor, mode: Literal["fake", "symbolic"] = "fake"
) -> bool:
    """Ask for the second argument of the last ``addcmul`` in the functional graph of ``function``."""
    reader, residual = _reader_and_residual(make_fx(function, tracing_mode=mode)(*inputs))
    return is_overwritable(residual, reader)


def _reader_and_residual(module: GraphModule) -> tuple[Node, Node]:
    (reader,) = module.graph.find_nodes(op="call_function", target=aten.addcmul.default)
    residual = reader.args[1]
    assert isinstance(residual, Node)
    return reader, residual


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


def _kernel(residual: Tensor, h: Tensor) -> Tensor:
    """Stand for a kernel that reads ``residual`` once."""
    return torch.addcmul(h, residual, h)


def read_later(h: Tensor, x: Tensor) -> Any:
    s = x.sin()
    return _kernel(s, h), s.cos()


def read_before(h: Tensor, x: Tensor) -> Any:
    s = x.sin()
    c = s.cos()
    return _kernel(s, h) + c


def read_by_the_output(h: Tensor, x: Tensor) -> Any:
    s = x.sin()
    return _kernel(s, h), s


def viewed_before(h: Tensor, x: Tensor) -> Any:
    s = x.sin()
    view = s.t()
    return _kernel(s, h), view


def inside_a_cat(h: Tensor, x: Tensor) -> Any:
    s = x.sin()
    joined = torch.cat([s, x])
    return _kernel(s, h), joined


def inside_a_stack(h: Tensor, x: Tensor) -> Any:
    s = x.sin()
    joined = torch.stack([s, x])
    return _kernel(s, h), joined


def used_twice(h: Tensor, x: Tensor) -> Any:
    s = x.sin()
    return torch.addcmul(h, s, s)


CASES: dict[str, tuple[Callable[..., Any], bool]] = {
    "computed": (lambda h, x: _kernel(x.sin(), h), True),
    "read before": (read_before, True),
    "converted from another dtype": (
        lambda h, x: _kernel(
            prims.convert_element_type(x.round().to(torch.int32), torch.float32), h
        ),
        True,
    ),
    "input": (lambda h, x: _kernel(x, h), False),
    "view of an input": (lambda h, x: _kernel(x[:], h), False),
    "view of a view": (lambda h, x: _kernel(x.view(16).view(4, 4), h), False),
    "view of a computed value": (lambda h, x: _kernel(x.sin().view(4, 4), h), False),
    "clone of an input": (lambda h, x: _kernel(x.clone(), h), False),
    "copy in the same dtype": (
        lambda h, x: _kernel(prims.convert_element_type(x, torch.float32), h),
        False,
    ),
    "cat of an input": (lambda h, x: _kernel(torch.cat([x[:2], x[2:]]), h), False),
    "read later": (read_later, False),
    "read by the output": (read_by_the_output, False),
    "viewed before": (viewed_before, False),
    "inside a cat": (inside_a_cat, False),
    "inside a stack": (inside_a_stack, False),
    "used twice": (used_twice, False),
    "another dtype": (lambda h, x: _kernel(x.sin().to(torch.float16), h), False),
    "broadcast": (lambda h, x: _kernel(x.sin()[:1].cos(), h), False),
    "another layout": (lambda h, x: _kernel(x.t().sin(), h), False),
}


@pytest.mark.parametrize("name", CASES)
def test_two_dimensions(name: str) -> None:
    function, expected = CASES[name]
    assert _answer(function, *_inputs()) is expected


@pytest.mark.parametrize(
    ("memory_format", "expected"),
    [(torch.channels_last, True), (torch.contiguous_format, False)],
)
def test_four_dimensions_are_channels_last(
    memory_format: torch.memory_format, *, expected: bool
) -> None:
    h = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 5).to(memory_format=memory_format)
    assert _answer(lambda h, x: _kernel(x.sin(), h), h, x) is expected


def test_symbolic_sizes_that_are_the_same() -> None:
    assert _answer(lambda h: _kernel(h.sin(), h), torch.randn(4, 5), mode="symbolic")


def test_the_question_adds_no_guard() -> None:
    def function(h: Tensor, x: Tensor) -> Tensor:
        return _kernel(torch.cat([x, x]).sin(), h)

    # 4 rows are twice 2 by chance: another batch may differ, so there is no certainty.
    graph = make_fx(function, tracing_mode="symbolic")(torch.randn(4, 5), torch.randn(2, 5))
    reader, residual = _reader_and_residual(graph)
    shape_env = residual.meta["val"].fake_mode.shape_env
    before = list(shape_env.guards)
    is_overwritable(residual, reader)
    assert shape_env.guards == before


def test_a_constant() -> None:
    graph = make_fx(lambda h, x: _kernel(x, h), tracing_mode="fake")(*_inputs())
    reader, residual = _reader_and_residual(graph)
    graph.register_buffer("constant", torch.ones(4, 4))
    with graph.graph.inserting_before(residual):
        constant = graph.graph.get_attr("constant")
    constant.meta = residual.meta
    reader.replace_input_with(residual, constant)
    assert not is_overwritable(constant, reader)


def test_an_op_that_returns_its_argument_without_saying_so() -> None:
    """Dropout in inference, say: its schema promises a new tensor, its value lives in the old one's memory."""

    def function(h: Tensor, x: Tensor) -> Any:
        s = x.sin()
        same = s.cos()
        return _kernel(s, h), same

    graph = make_fx(function, tracing_mode="fake")(*_inputs())
    reader, residual = _reader_and_residual(graph)
    assert is_overwritable(residual, reader)
    (same,) = [user for user in residual.users if user is not reader]
    same.meta["val"] = residual.meta["val"].view(4, 4)
    assert not is_overwritable(residual, reader)


@pytest.mark.parametrize("other", [None, 1.0, "x"])
def test_what_is_no_node(other: Any) -> None:
    graph = make_fx(lambda h: h.sin(), tracing_mode="fake")(torch.randn(2))
    assert not is_overwritable(other, _last(graph))


def test_unknown_values() -> None:
    graph = make_fx(lambda h: h.sin().cos(), tracing_mode="fake")(torch.randn(2))
    cos = _last(graph)
    (sin,) = cos.all_input_nodes
    assert is_overwritable(sin, cos)
    for node in (sin, cos):
        value = node.meta.pop("val")
        assert not is_overwritable(sin, cos)
        node.meta["val"] = value


def _last(graph: GraphModule) -> Node:
    return next(node for node in reversed(graph.graph.nodes) if node.op == "call_function")
