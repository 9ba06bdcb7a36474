import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx import GraphModule

from versatil_passes import DecomposeQuantization

qd = torch.ops.quantized_decomposed
U8 = (0.037, 113, 0, 255, torch.uint8)
U7 = (0.037, 60, 0, 127, torch.uint8)
S8 = (0.037, -5, -128, 127, torch.int8)


def _decomposed(function: Callable[..., Any]) -> GraphModule:
    module = fx.symbolic_trace(function)
    assert DecomposeQuantization()(module.graph) > 0
    module.graph.lint()
    module.recompile()
    left = [str(node.target) for node in module.graph.nodes]
    assert not [target for target in left if "quantized_decomposed" in target]
    return module


def _assert_equal(result: Any, expected: Any) -> None:
    results = result if isinstance(result, tuple) else (result,)
    for got, wanted in zip(
        results, expected if isinstance(expected, tuple) else (expected,), strict=True
    ):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def _data() -> Tensor:
    """Beyond every range, with values half way between two steps."""
    ties = (torch.arange(-300, 300) + 0.5) * 0.037
    return torch.cat([ties, 6 * torch.randn(2000)])


@pytest.mark.parametrize("params", [U8, U7, S8])
def test_static_quantize_and_dequantize(params: Any) -> None:
    def function(x: Tensor) -> Any:
        q = qd.quantize_per_tensor.default(x, *params)
        return q, qd.dequantize_per_tensor.default(q, *params)

    x = _data()
    _assert_equal(_decomposed(function)(x), function(x))


@pytest.mark.parametrize("params", [U8, U7, S8])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float64])
def test_parameters_in_tensors(params: Any, scale_dtype: torch.dtype) -> None:
    def function(x: Tensor, scale: Tensor, zero_point: Tensor) -> Any:
        q = qd.quantize_per_tensor.tensor(x, scale, zero_point, *params[2:])
        return q, qd.dequantize_per_tensor.tensor(q, scale, zero_point, *params[2:])

    scale = torch.tensor([params[0]], dtype=scale_dtype)
    inputs = _data(), scale, torch.tensor([params[1]])
    _assert_equal(_decomposed(function)(*inputs), function(*inputs))


def test_many_double_scales_round_as_eager_does() -> None:
    def function(x: Tensor, scale: Tensor, zero_point: Tensor) -> Any:
        q = qd.quantize_per_tensor.tensor(x, scale, zero_point, *U8[2:])
        return q, qd.dequantize_per_tensor.tensor(q, scale, zero_point, *U8[2:])

    module = _decomposed(function)
    for seed in range(50):
        torch.manual_seed(seed)
        scale = 0.01 + 0.05 * torch.rand(1, dtype=torch.float64)
        ties = ((torch.arange(-200, 200) + 0.5) * scale).float()
        inputs = ties, scale, torch.tensor([100])
        _assert_equal(module(*inputs), function(*inputs))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("has_zero_points", [True, False])
def test_per_channel(axis: int, *, has_zero_points: bool) -> None:
    q = torch.randint(-128, 128, (3, 4, 5), dtype=torch.int8)
    scales = torch.rand(q.shape[axis])
    zero_points = torch.randint(-9, 9, scales.shape) if has_zero_points else None

    def function(q: Tensor, scales: Tensor) -> Any:
        params = (scales, zero_points, axis, -128, 127, torch.int8)
        return qd.dequantize_per_channel.default(q, *params)

    _assert_equal(_decomposed(function)(q, scales), function(q, scales))


def test_quantize_per_channel() -> None:
    """Weights whose quantize was not folded have it."""

    def function(x: Tensor, scales: Tensor, zero_points: Tensor) -> Any:
        params = (scales, zero_points, 1, -127, 127, torch.int8)
        return qd.quantize_per_channel.default(x, *params)

    inputs = torch.randn(6, 5), 0.001 + torch.rand(5) / 50, torch.tensor([0, 3, -4, 0, 1])
    _assert_equal(_decomposed(function)(*inputs), function(*inputs))


RANGES = {
    "all positive": lambda x: x.abs() + 1,
    "all negative": lambda x: -x.abs() - 1,
    "mixed": lambda x: x,
    "zero": torch.zeros_like,
    "a positive constant": lambda x: torch.full_like(x, 3.7),
    "a negative constant": lambda x: torch.full_like(x, -3.7),
    "tiny": lambda x: x * 1e-9,
    "one side": lambda x: x.relu(),
}


def _dynamic(x: Tensor, params: Any = U8) -> Any:
    low, high, dtype = params[2:]
    scale, zero_point = qd.choose_qparams.tensor(x, low, high, 2**-12, dtype)
    q = qd.quantize_per_tensor.tensor(x, scale, zero_point, low, high, dtype)
    return scale, zero_point, q, qd.dequantize_per_tensor.tensor(q, scale, zero_point, *params[2:])


def _traced_dynamic(params: Any) -> GraphModule:
    """A proxy cannot be unpacked into two, so the graph is written down."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    chosen = graph.call_function(qd.choose_qparams.tensor, (x, *params[2:4], 2**-12, params[4]))
    scale, zero_point = (graph.call_function(operator.getitem, (chosen, i)) for i in (0, 1))
    rest = (scale, zero_point, *params[2:])
    q = graph.call_function(qd.quantize_per_tensor.tensor, (x, *rest))
    y = graph.call_function(qd.dequantize_per_tensor.tensor, (q, *rest))
    graph.output((scale, zero_point, q, y))
    module = GraphModule(nn.Module(), graph)
    assert DecomposeQuantization()(graph) == 3
    graph.lint()
    module.recompile()
    assert "quantized_decomposed" not in module.code
    return module


@pytest.mark.parametrize("params", [U8, U7, S8])
@pytest.mark.parametrize("name", RANGES)
def test_dynamic(name: str, params: Any) -> None:
    make: Any = RANGES[name]
    x = make(torch.randn(40, 50))
    _assert_equal(_traced_dynamic(params)(x), _dynamic(x, params))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-4, 100), shift=st.floats(-50, 50))
def test_dynamic_on_random_ranges(seed: int, scale: float, shift: float) -> None:
    x = scale * torch.randn(300, generator=torch.Generator().manual_seed(seed)) + shift
    _assert_equal(_traced_dynamic(U8)(x), _dynamic(x))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(half: torch.dtype) -> None:
    """The ops compute in float32 whatever they are given."""

    def function(x: Tensor) -> Any:
        return qd.quantize_per_tensor.default(x, *U8)

    x = (6 * torch.randn(2000)).to(half)
    _assert_equal(_decomposed(function)(x), function(x))
    _assert_equal(_traced_dynamic(U8)(x), _dynamic(x))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_results(half: torch.dtype) -> None:
    scales, zero_points = torch.rand(4), torch.zeros(4, dtype=torch.int64)

    def function(q: Tensor, weight: Tensor, scales: Tensor, zero_points: Tensor) -> Any:
        params = (scales, zero_points, 0, -128, 127, torch.int8)
        return (
            qd.dequantize_per_tensor.default(q, *U8, out_dtype=half),
            qd.dequantize_per_channel.default(weight, *params, out_dtype=half),
        )

    q = torch.randint(0, 256, (300,), dtype=torch.uint8)
    inputs = q, torch.randint(-128, 128, (4, 6), dtype=torch.int8), scales, zero_points
    _assert_equal(_decomposed(function)(*inputs), function(*inputs))


def test_meta_is_kept(build: Any) -> None:
    module, inputs = build.linear(output=build.wide).build()
    before = {
        node.name: node.meta["val"].shape for node in module.graph.nodes if "val" in node.meta
    }
    result = module.graph.output_node().args[0][0]

    DecomposeQuantization()(module.graph)

    new = module.graph.output_node().args[0][0]
    assert new is not result
    assert new.meta["val"].shape == before["quantize_per_tensor_1"]
    assert new.meta["val"].dtype == torch.uint8
    module.recompile()
    assert module(*inputs).dtype == torch.uint8


def test_a_whole_reference(form: Any) -> None:
    module, inputs = form.build()
    with torch.no_grad():
        expected = module(*inputs)
        assert DecomposeQuantization()(module.graph) >= 3
        module.recompile()
        assert "quantized_decomposed" not in module.code
        torch.testing.assert_close(module(*inputs), expected, rtol=0, atol=0)


def test_a_graph_without_quantization_stays() -> None:
    graph = fx.symbolic_trace(lambda x: x + 1).graph
    before = str(graph)
    assert DecomposeQuantization()(graph) == 0
    assert str(graph) == before
