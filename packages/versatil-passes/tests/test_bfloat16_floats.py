"""Where values are rounded to bfloat16, in graphs as ``convert_pt2e`` leaves them."""

import math
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor, nn
from torch.fx import GraphModule

from versatil_passes import Int8Lowering, LoweringRules
from versatil_passes.bfloat16_casts import compute_in_float32, dtype_of
from versatil_passes.bfloat16_constants import LARGEST
from versatil_passes.bfloat16_floats import Bfloat16Floats

aten, qd = torch.ops.aten, torch.ops.quantized_decomposed
X: Any = (0.03, 128, 0, 255, torch.uint8)
BFLOAT16 = torch.bfloat16
RULES = LoweringRules(
    ("x86_64",),
    post_ops={"linear": frozenset({"relu", "gelu"})},
    residual_post_ops={"linear": frozenset({"relu"})},
    allow_bfloat16_output=True,
)


class Int8Linear(nn.Module):
    """A linear between a quantize and dequantize, in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randint(-60, 60, (16, 16), dtype=torch.int8, generator=generator)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.linspace(0.001, 0.003, 16))
        self.register_buffer("zero_point", torch.zeros(16, dtype=torch.int64))
        self.bias: Tensor
        self.register_buffer("bias", torch.linspace(-1, 1, 16).to(dtype))
        self.out: Any = {} if dtype is torch.float32 else {"out_dtype": dtype}

    def forward(self, x: Tensor) -> Tensor:
        x = qd.dequantize_per_tensor(qd.quantize_per_tensor(x, *X), *X, **self.out)
        args = (self.weight, self.scale, self.zero_point, 0, -127, 127, torch.int8)
        return torch.nn.functional.linear(
            x, qd.dequantize_per_channel(*args, **self.out), self.bias
        )


class Model(nn.Module):
    """``function(first, second, x)``."""

    def __init__(self, function: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.first, self.second = function, Int8Linear(dtype), Int8Linear(dtype)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.first, self.second, x)


def exported(function: Any, dtype: torch.dtype = torch.float32) -> GraphModule:
    x = torch.randn(4, 16, dtype=dtype)
    module = torch.export.export(Model(function, dtype), (x,)).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module


def converted(function: Any, dtype: torch.dtype = torch.float32) -> tuple[GraphModule, int]:
    module = exported(function, dtype)
    rounded = Bfloat16Floats(only_layers=dtype is BFLOAT16)(module.graph)
    module.graph.lint()
    module.recompile()
    return module, rounded


def lowered_as(module: GraphModule) -> list[str]:
    lowering = Int8Lowering(RULES)
    record = lowering(module.graph)
    assert not record.declined
    return [str(op) for op in record.lowered]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=["float32", "bfloat16"])


@DTYPES
def test_a_layer_and_its_function_round_once(dtype: torch.dtype) -> None:
    module, rounded = converted(lambda a, _, x: torch.tanh(torch.relu(a(x))), dtype)
    assert rounded == 1
    assert lowered_as(module) == ["linear + relu -> bfloat16"]
    x = torch.randn(4, 16)
    exact = exported(lambda a, _, x: torch.relu(a(x)))(x)
    if dtype is torch.float32:
        assert torch.equal(module(x), torch.tanh(exact.to(BFLOAT16)))


@DTYPES
def test_nothing_is_rounded_between_int8_layers(dtype: torch.dtype) -> None:
    module, rounded = converted(lambda a, b, x: b(torch.relu(a(x))), dtype)
    assert rounded == 1
    assert lowered_as(module) == ["linear + relu -> uint8", "linear -> bfloat16"]


@DTYPES
def test_an_addition_rounds_once(dtype: torch.dtype) -> None:
    module, rounded = converted(lambda a, b, x: torch.relu(torch.tanh(a(x)) + b(x)), dtype)
    assert rounded == 2
    assert lowered_as(module) == ["linear -> bfloat16", "linear + add + relu -> bfloat16"]


def test_of_two_layers_that_are_added_the_earlier_is_rounded() -> None:
    module, rounded = converted(lambda a, b, x: a(x) + b(x))
    assert rounded == 2
    assert lowered_as(module) == ["linear -> bfloat16", "linear + add -> bfloat16"]


def test_ops_between_dequantize_and_quantize_stay_float32() -> None:
    def pooled(a: Any, b: Any, x: Tensor) -> Tensor:
        q = qd.quantize_per_tensor(a(x), *X)
        y = torch.nn.functional.max_pool1d(qd.dequantize_per_tensor(q, *X), 1)
        return b(y)  # quantizes first

    module, _ = converted(pooled)
    [pool] = [node for node in module.graph.nodes if "max_pool1d" in str(node.target)]
    assert dtype_of(pool) is torch.float32
    assert lowered_as(module)[0] == "linear -> uint8"


def test_what_comes_before_the_first_layer_stays_float32() -> None:
    def turned(a: Any, _: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        turns = torch.cos(torch.arange(16, dtype=torch.float32) + 1000)
        return a(x) * turns, turns

    module, _ = converted(turned)
    product, turns = module(torch.randn(4, 16))
    assert product.dtype is BFLOAT16
    assert torch.equal(turns, torch.cos(torch.arange(16.0) + 1000))


def test_numbers_that_bfloat16_does_not_reach() -> None:
    lowest = torch.finfo(torch.float32).min

    def masked(a: Any, _: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = a(x)
        return y.masked_fill(y > 0, lowest), y + torch.full((16,), -math.inf)

    module, _ = converted(masked)
    finite, infinite = module(torch.randn(4, 16))
    assert finite.min().item() == -LARGEST
    assert infinite.isinf().all()


def test_casts_of_the_model_stay() -> None:
    module, _ = converted(lambda a, _, x: torch.softmax(torch.tanh(a(x)).float(), -1))
    assert module(torch.randn(4, 16)).dtype is torch.float32


def test_measured_scales_are_computed_in_float32() -> None:
    def measured(a: Any, _: Any, x: Tensor) -> Tensor:
        scale, _zero_point = qd.choose_qparams.tensor(torch.tanh(a(x)), 0, 255, 2**-12, torch.uint8)
        return scale

    module, _ = converted(measured)
    [node] = [node for node in module.graph.nodes if "choose_qparams" in str(node.target)]
    assert dtype_of(node.args[0]) is torch.float32


def test_several_results() -> None:
    module, _ = converted(lambda a, _, x: torch.cat(torch.tanh(a(x)).chunk(2, -1)))
    assert module(torch.randn(4, 16)).dtype is BFLOAT16
    assert all(
        dtype_of(node) is BFLOAT16
        for node in module.graph.nodes
        if "getitem" in str(node.target) or "cat" in str(node.target)
    )


def test_an_op_can_be_kept_in_float32() -> None:
    module, _ = converted(lambda a, _, x: torch.tanh(a(x)) + 1)
    [tanh] = [node for node in module.graph.nodes if "tanh" in str(node.target)]
    compute_in_float32(tanh)
    module.recompile()
    assert dtype_of(tanh) is torch.float32
    assert module(torch.randn(4, 16)).dtype is BFLOAT16


@DTYPES
def test_a_second_run_changes_nothing(dtype: torch.dtype) -> None:
    module, _ = converted(lambda a, b, x: b(torch.tanh(a(x))) + 1, dtype)
    before = str(module.graph)
    assert Bfloat16Floats(only_layers=dtype is BFLOAT16)(module.graph) == 0
    assert str(module.graph) == before


def test_float32_models_are_left_alone() -> None:
    module = exported(lambda a, b, x: b(torch.tanh(a(x))) + 1)
    before = str(module.graph)
    assert Bfloat16Floats(only_layers=True)(module.graph) == 0
    assert str(module.graph) == before
