"""Random chains of commuting ops, between quantizes and between layers: with the passes and without, the same bits."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from versatil_passes import KeepInt8, QuantizeLayerOutputs
from versatil_passes.commuting_ops import let_pools_run_eagerly

qd = torch.ops.quantized_decomposed
Chain = list[Callable[[Tensor], Tensor]]

bounds = st.floats(-6, 6, width=32)
chains: st.SearchStrategy[Chain] = st.lists(
    st.one_of(
        st.tuples(bounds, bounds).map(
            lambda pair: lambda x: x.clamp(min(pair), max(pair))  # a bound between two steps
        ),
        st.tuples(st.integers(1, 3), st.integers(1, 2)).map(
            lambda sizes: lambda x: F.max_pool2d(x, sizes[0], sizes[1], sizes[0] // 2)
        ),
        bounds.map(lambda value: lambda x: F.pad(x, (1, 0, 2, 1), value=value)),
        st.sampled_from(
            [
                torch.relu,
                lambda x: x.transpose(-1, -2),
                lambda x: torch.cat([x, x.relu()], 2),
                lambda x: x.chunk(2, 1)[0],
                lambda x: torch.stack(x.split(1, 2)[:2], 2).flatten(2, 3),
                lambda x: F.relu(x, inplace=True),
                lambda x: F.dropout(x, training=False),
            ]
        ),
    ),
    max_size=5,
)
# A scale as an observer finds it, and every kind of range.
params = st.tuples(
    st.floats(2.0**-7, 0.25, width=32),
    st.sampled_from(
        [
            *[(0, 255, torch.uint8), (0, 127, torch.uint8)],
            *[(-128, 127, torch.int8), (-127, 127, torch.int8)],
        ]
    ),
    st.integers(0, 255),
).map(lambda drawn: (drawn[0], drawn[1][0] + drawn[2] % (drawn[1][1] - drawn[1][0] + 1), *drawn[1]))
shapes = st.tuples(*[st.integers(1, 5)] * 2, *[st.integers(2, 9)] * 2)


def follow(functions: Chain, x: Tensor) -> Tensor:
    for function in functions:
        x = function(x)
    return x


def keep(module: GraphModule) -> int:
    count = KeepInt8()(module.graph)
    let_pools_run_eagerly(module.graph)
    module.graph.lint()
    module.recompile()
    return count


@given(chains, params, shapes)
@settings(deadline=None, max_examples=60)
def test_between_two_quantizes(
    build: Any, functions: Chain, quantization: Any, shape: tuple[int, ...]
) -> None:
    def between(_: Any, x: Tensor) -> Any:
        y = follow(functions, build.through_int8(x, quantization))
        return build.through_int8(y, quantization)

    x = 8 * torch.randn(shape)
    module = build.export(build.function(between), x)
    expected = module(x)

    assert keep(module) == 1
    assert torch.equal(module(x), expected)


@given(chains, params, shapes)
@settings(deadline=None, max_examples=40)
def test_behind_a_layer(
    build: Any, functions: Chain, quantization: Any, shape: tuple[int, ...]
) -> None:
    """The quantize moves to the layer; what the layer gives reaches far beyond the range."""
    weight = torch.randn(4, shape[1], 1, 1)

    def behind(_: Any, x: Tensor) -> Any:
        y = follow(functions, F.conv2d(build.through_int8(x), weight))
        return build.through_int8(y, quantization)

    x = 8 * torch.randn(shape)
    module = build.export(build.function(behind), x)
    expected = module(x)

    moved = QuantizeLayerOutputs()(module.graph)
    module.recompile()
    assert torch.equal(module(x), expected)
    assert keep(module) == moved
    assert torch.equal(module(x), expected)
