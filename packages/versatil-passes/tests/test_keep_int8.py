"""Which quantizes KeepInt8 removes, and what it leaves as it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from versatil_passes import KeepInt8
from versatil_passes.commuting_ops import let_pools_run_eagerly

aten, qd = torch.ops.aten, torch.ops.quantized_decomposed
Params = tuple[float, int, int, int, torch.dtype]
U8: Params = (0.05, 117, 0, 255, torch.uint8)
NARROW: Params = (0.043, 40, 0, 127, torch.uint8)
OTHER: Params = (0.06, 117, 0, 255, torch.uint8)


def through(x: Tensor, params: Params = U8) -> Tensor:
    """Quantize and dequantize."""
    result: Tensor = qd.dequantize_per_tensor(qd.quantize_per_tensor(x, *params), *params)
    return result


def example() -> Tensor:
    return 4 * torch.randn(2, 4, 6, 6)


def keep(module: GraphModule) -> int:
    count = KeepInt8()(module.graph)
    let_pools_run_eagerly(module.graph)
    module.graph.lint()
    module.recompile()
    return count


def quantize_count(module: GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=qd.quantize_per_tensor.default))


def check(function: Callable[..., Any], kept: int, build: Any, *inputs: Tensor) -> GraphModule:
    """So many quantizes go, and the results are the same to the bit."""
    inputs = inputs or (example(),)
    module: GraphModule = build.export(build.function(lambda _, *x: function(*x)), *inputs)
    expected, before = module(*inputs), quantize_count(module)
    assert keep(module) == kept
    assert quantize_count(module) == before - kept
    results = module(*inputs)
    pairs = (
        zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]
    )
    assert all(torch.equal(result, value) for result, value in pairs)
    return module


@pytest.mark.parametrize(
    "after",
    [
        OTHER,
        (0.05, 118, 0, 255, torch.uint8),
        (0.05, 117, 1, 255, torch.uint8),
        (0.05, 117, 0, 254, torch.uint8),
        (0.05, 117, 0, 127, torch.int8),
    ],
)
def test_other_parameters_stay(after: Params, build: Any) -> None:
    check(lambda x: through(through(x).relu(), after), 0, build)


@pytest.mark.parametrize("scale", [1e-40, 1e32])
def test_scales_outside_the_normal_range_stay(scale: float, build: Any) -> None:
    params = (scale, 117, 0, 255, torch.uint8)
    check(lambda x: through(through(x, params).relu(), params), 0, build)


def test_what_is_not_float32_stays(build: Any) -> None:
    def half(x: Tensor) -> Tensor:
        q = qd.quantize_per_tensor(x, *U8)
        y = qd.dequantize_per_tensor(q, *U8, out_dtype=torch.bfloat16)
        return qd.dequantize_per_tensor(qd.quantize_per_tensor(y.relu(), *U8), *U8)

    check(half, 0, build)


@pytest.mark.parametrize(("params", "kept"), [(NARROW, 0), (U8, 1)])
def test_an_input_that_may_be_out_of_range_stays(params: Params, kept: int, build: Any) -> None:
    """An int8 input of the graph may hold every value of its dtype; the quantize would bound it."""

    def requantized(q: Tensor) -> Tensor:
        return through(qd.dequantize_per_tensor(q, *params), params)

    check(requantized, kept, build, torch.arange(256, dtype=torch.uint8))


def test_a_second_island_behind_a_view_knows_its_range(build: Any) -> None:
    def two(x: Tensor) -> Tensor:
        q = qd.quantize_per_tensor(F.max_pool2d(through(x, NARROW), 2), *NARROW)
        return through(qd.dequantize_per_tensor(q.flatten(1), *NARROW).relu(), NARROW)

    check(two, 2, build)


def test_a_result_of_the_graph_stays(build: Any) -> None:
    """It would become a view of the input."""

    def result(q: Tensor) -> Tensor:
        y: Tensor = qd.quantize_per_tensor(qd.dequantize_per_tensor(q, *U8).view(-1), *U8)
        return y

    check(result, 0, build, torch.zeros(2, 3, dtype=torch.uint8))


def test_what_is_read_as_float_too_stays(build: Any) -> None:
    def read_twice(x: Tensor) -> Any:
        y = F.max_pool2d(through(x), 2).relu()
        return through(y), y.sin()

    module = check(read_twice, 1, build)
    assert len(module.graph.find_nodes(op="call_function", target=aten.max_pool2d.default)) == 2


def _write_to_view(x: Tensor) -> Tensor:
    y = F.max_pool2d(x, 2)
    y[:, 0].add_(1.0)
    return y.relu()


def _write_in_place_and_read(x: Tensor) -> Tensor:
    y = F.max_pool2d(x, 2)
    return torch.cat([F.relu(y[:, :2], inplace=True), y], 1)


@pytest.mark.parametrize("function", [_write_to_view, _write_in_place_and_read])
def test_what_is_written_to_stays(function: Callable[[Tensor], Tensor], build: Any) -> None:
    check(lambda x: through(function(through(x))), 0, build)


@pytest.mark.parametrize(
    ("branch", "kept"),
    [
        (lambda y: y.sin(), 0),
        (lambda y: through(y, OTHER), 0),
        (lambda y: F.avg_pool2d(through(y), 3, 1, 1), 0),
        (lambda y: through(y).relu(), 1),
        (through, 1),
    ],
    ids=["float", "another scale", "average", "relu", "same scale"],
)
def test_a_concatenation_needs_int8_in_every_branch(
    branch: Callable[[Tensor], Tensor], kept: int, build: Any
) -> None:
    def join(x: Tensor, y: Tensor) -> Tensor:
        return through(torch.cat([through(x), branch(y)], 1))

    check(join, kept, build, example(), example())


def test_a_deep_graph_of_concatenations_is_walked_once(build: Any) -> None:
    def dense(x: Tensor) -> Tensor:
        x = through(x)
        for _ in range(40):
            x = torch.cat([x, x], 1)[:, :4]
        return through(x)

    check(dense, 1, build)


def test_the_int8_op_says_what_it_replaces(build: Any) -> None:
    def several(_: Any, x: Tensor) -> Tensor:
        y = F.pad(F.max_pool2d(through(x), 2).relu(), (1, 1))
        return through(y.permute(0, 2, 3, 1).clamp(0.1, 1))

    module = build.export(build.function(several), example())
    last = module.graph.find_nodes(op="call_function", target=qd.quantize_per_tensor.default)[-1]
    before = {node.name for node in module.graph.nodes}

    KeepInt8()(module.graph)

    (node,) = (node for node in module.graph.nodes if "replaces" in node.meta)
    assert node.meta["replaces"] == last.name
    assert node.meta["lowered_as"] == "max_pool2d + relu + pad + permute + clamp -> uint8"
    assert node.meta["val"].dtype is torch.uint8
    assert node.name not in before
    assert KeepInt8()(module.graph) == 0
    assert KeepInt8().uuid() == KeepInt8().uuid()


def test_a_graph_without_quantizes() -> None:
    assert KeepInt8()(symbolic_trace(lambda x: x.relu()).graph) == 0
