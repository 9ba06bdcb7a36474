"""Each op that commutes with a quantize runs on int8, with equal results to the bit; what doesn't stays."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule

from versatil_passes import DecomposeQuantization, KeepInt8, commuting_ops, pre_grad_passes
from versatil_passes.commuting_ops import Quantization, let_pools_run_eagerly

aten, qd = torch.ops.aten, torch.ops.quantized_decomposed
Params = tuple[float, int, int, int, torch.dtype]
U8: Params = (0.05, 117, 0, 255, torch.uint8)
NARROW: Params = (0.043, 40, 0, 127, torch.uint8)
S8: Params = (0.031, -5, -128, 127, torch.int8)

ANY_DTYPE: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "view": lambda x: x.view(2, 4, -1),
    "reshape": lambda x: x.reshape(-1, 6),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "t": lambda x: x[0, 0].t(),
    "mT": lambda x: x.mT,
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "movedim": lambda x: x.movedim(1, -1),
    "slice": lambda x: x[:, 1:, :, ::2],
    "select": lambda x: x[:, 0],
    "squeeze": lambda x: x.unsqueeze(0).squeeze(),
    "squeeze one": lambda x: x.unsqueeze(0).squeeze(0),
    "squeeze some": lambda x: x[None, None].squeeze((0, 1)),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "clone": lambda x: x.transpose(1, 2).clone(),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "narrow": lambda x: x.narrow(2, 1, 3),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "split": lambda x: x.split(2, 1)[0],
    "split by sizes": lambda x: x.split([1, 3], 1)[1],
    "tensor_split": lambda x: x.tensor_split(2, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "two parts": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "cat": lambda x: torch.cat([x, x[:, :2]], 1),
    "stack": lambda x: torch.stack([x, x], 2),
    "relu": torch.relu,
    "relu6": F.relu6,
    "relu in place": lambda x: F.relu(x.view(2, 4, -1), inplace=True),
    "clamp": lambda x: x.clamp(-0.33, 0.78),
    "clamp_min": lambda x: x.clamp_min(0.4),
    "hardtanh below": lambda x: F.hardtanh(x, -90.0, -80.0),
    "dropout": lambda x: F.dropout(x, training=False),
    "max_pool1d": lambda x: F.max_pool1d(x.flatten(2), 3, 2, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max_pool3d": lambda x: F.max_pool3d(x.unsqueeze(1), 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "zero padding": lambda x: F.pad(x, (1, 2, 0, -1)),
    "padding": lambda x: F.pad(x, (1, 1), value=0.123),
    "infinite padding": lambda x: F.pad(x, (1, 1), value=float("-inf")),
    "several": lambda x: F.pad(F.max_pool2d(x, 2).relu(), (1, 1)).permute(0, 2, 3, 1).clamp(0.1, 1),
}
OF_UINT8: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "nearest to a size": lambda x: F.interpolate(x, size=(9, 5)),
    "nearest 1d": lambda x: F.interpolate(x.flatten(2), scale_factor=2.0),
    "nearest 3d": lambda x: F.interpolate(x.unsqueeze(1), scale_factor=2.0),
    "exact": lambda x: F.interpolate(x, size=(9, 5), mode="nearest-exact"),
    "exact 1d": lambda x: F.interpolate(x.flatten(2), size=17, mode="nearest-exact"),
    "exact 3d": lambda x: F.interpolate(x.unsqueeze(1), size=(3, 9, 5), mode="nearest-exact"),
}
STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "average": lambda x: F.avg_pool2d(x, 2),
    "mean": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive": lambda x: F.adaptive_max_pool2d(x, 2),
    "pooling with indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "dilated": lambda x: F.max_pool2d(x, 2, 1, dilation=2),
    "large window": lambda x: F.max_pool2d(x, 6, 1, 3),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "reflection": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "padding with no number": lambda x: F.pad(x, (1, 1), value=float("nan")),
    "bound that is no number": lambda x: x.clamp_min(float("nan")),
    "bounds that are tensors": lambda x: x.clamp(x.amin(), x.amax()),
    "dropout in training": lambda x: F.dropout(x, training=True),
    "bytes": lambda x: x.view(torch.int32).view(torch.float32),
    "negative": lambda x: -x,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "double": lambda x: x.double().float(),
}


def between(function: Callable[..., Any], params: Params, build: Any) -> Any:
    """A function between a dequantize and a quantize."""

    def forward(_: Any, x: Tensor) -> Any:
        return build.through_int8(function(build.through_int8(x, params)), params)

    return build.function(forward)


def example(*, channels_last: bool = False) -> Tensor:
    x = 4 * torch.randn(2, 4, 6, 6)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def keep(module: GraphModule) -> int:
    count = KeepInt8()(module.graph)
    let_pools_run_eagerly(module.graph)
    module.graph.lint()
    module.recompile()
    return count


def check_kept(function: Callable[..., Any], params: Params, x: Tensor, build: Any) -> GraphModule:
    """Everything between runs on int8, and nothing changes."""
    exported: GraphModule = build.export(between(function, params, build), x)
    expected = exported(x)
    assert keep(exported) == 1
    assert torch.equal(exported(x), expected)
    functions = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert functions[0].target is qd.quantize_per_tensor.default
    assert functions[-1].target is qd.dequantize_per_tensor.default
    on_int8 = [node.meta.get("val") for node in functions[:-1]]
    tensors = [value for value in on_int8 if isinstance(value, Tensor)]
    assert {value.dtype for value in tensors} == {params[-1]}
    return exported


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("params", [U8, NARROW, S8], ids=["uint8", "narrow", "int8"])
@pytest.mark.parametrize("name", ANY_DTYPE)
def test_it_runs_on_int8(name: str, params: Params, build: Any, *, channels_last: bool) -> None:
    if channels_last and name in {"view", "relu in place"}:
        pytest.skip("no view of channels last")
    check_kept(ANY_DTYPE[name], params, example(channels_last=channels_last), build)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", OF_UINT8)
def test_nearest_upsampling_of_uint8(name: str, build: Any, *, channels_last: bool) -> None:
    x = example(channels_last=channels_last)
    check_kept(OF_UINT8[name], NARROW, x, build)
    signed = build.export(between(OF_UINT8[name], S8, build), x)
    assert keep(signed) == 0  # torch has no such kernel


def test_every_op_has_its_example(build: Any) -> None:
    """What stands in the lists of the module, and no other test would miss."""
    found = set()
    for function in (*ANY_DTYPE.values(), *OF_UINT8.values()):
        module = build.export(between(function, U8, build), example())
        found |= {node.target for node in module.graph.nodes}
    names = ("_JOINS", "_PARTS", "_MOVES", "_UINT8_MOVES", "_MAX_POOLS")
    listed = frozenset[Any]().union(*(getattr(commuting_ops, name) for name in names))
    assert listed <= found


@pytest.mark.parametrize("name", STAYS)
def test_what_does_not_commute_stays(name: str, build: Any) -> None:
    module = build.export(between(STAYS[name], U8, build), example())
    before = [node.name for node in module.graph.nodes]
    assert keep(module) == 0
    assert [node.name for node in module.graph.nodes] == before


@pytest.mark.parametrize(("zero_point", "clamps"), [(0, 0), (1, 1), (117, 1), (255, 1)])
def test_a_relu_is_a_bound_at_zero_point(zero_point: int, clamps: int, build: Any) -> None:
    """Where no step lies below zero, there is nothing left to do."""
    params = (0.05, zero_point, 0, 255, torch.uint8)
    module = check_kept(torch.relu, params, example(), build)
    nodes = module.graph.find_nodes(op="call_function", target=aten.clamp.default)
    assert [node.args[1:] for node in nodes] == [(zero_point, 255)] * clamps


def test_a_bound_between_two_steps_is_rounded_as_the_quantize_does(build: Any) -> None:
    """0.125 and 0.375 lie in the middle: the even step is right, 2 and not 3 for the first."""
    params = (0.25, 2, 0, 255, torch.uint8)
    module = check_kept(lambda x: x.clamp(0.125, 0.375), params, example(), build)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.clamp.default)
    assert node.args[1:] == (2, 4)


def test_parts_of_a_split_are_erased_with_it(build: Any) -> None:
    module = check_kept(ANY_DTYPE["chunk"], U8, example(), build)
    chunks = module.graph.find_nodes(op="call_function", target=aten.chunk.default)
    parts = module.graph.find_nodes(op="call_function", target=operator.getitem)
    assert len(chunks) == len(parts) == 1


@pytest.mark.parametrize("params", [NARROW, S8], ids=["uint8", "int8"])
def test_compiled_results_are_equal(params: Params, build: Any) -> None:
    functions = {**ANY_DTYPE, **(OF_UINT8 if params is NARROW else {})}
    del functions["view"], functions["relu in place"]  # no view of channels last

    def run_all(_: Any, x: Tensor) -> list[Tensor]:
        y = build.through_int8(x, params)
        return [build.through_int8(function(y), params) for function in functions.values()]

    x = example(channels_last=True)
    module: GraphModule = build.export(build.function(run_all), x)
    counts: list[int] = []

    def count(graph: Graph) -> None:
        target = qd.quantize_per_tensor.default
        counts.append(len(graph.find_nodes(op="call_function", target=target)))

    with torch.no_grad(), pre_grad_passes(KeepInt8(), count, DecomposeQuantization()):
        results: Any = torch.compile(module)(x)

    assert counts == [1]
    assert all(map(torch.equal, results, module(x)))


# A scale as an observer finds it: float32, of some range divided by 255.
scales = st.floats(2.0**-40, 2.0**40, width=32)
ranges = st.sampled_from(
    [(0, 255, torch.uint8), (0, 127, torch.uint8), (-128, 127, torch.int8), (-127, 127, torch.int8)]
)


@given(scales, ranges, st.integers(0, 255))
@settings(deadline=None)
def test_a_quantize_gives_back_what_was_dequantized(
    scale: float, limits: tuple[int, int, torch.dtype], zero_point: int
) -> None:
    low, high, dtype = limits
    params = (scale, low + zero_point % (high - low + 1), low, high, dtype)
    q = torch.arange(low, high + 1).to(dtype)
    result = qd.quantize_per_tensor(qd.dequantize_per_tensor(q, *params), *params)
    assert Quantization(*params).is_invertible
    assert torch.equal(result, q)


@given(scales, ranges, st.integers(0, 255), st.floats(width=32, allow_nan=False))
@settings(deadline=None)
def test_a_constant_becomes_the_step_that_a_tensor_would(
    scale: float, limits: tuple[int, int, torch.dtype], zero_point: int, value: float
) -> None:
    low, high, dtype = limits
    params = Quantization(scale, low + zero_point % (high - low + 1), low, high, dtype)
    args = (params.scale, params.zero_point, low, high, dtype)
    expected = qd.quantize_per_tensor(torch.tensor([value]), *args)
    assert params.step_of(value) == expected.item()
