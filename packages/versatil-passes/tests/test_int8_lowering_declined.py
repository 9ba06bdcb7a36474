"""What stays float: each reason, and that the graph stays as it was."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from versatil_passes import Int8Lowering, LoweringRules

qd = torch.ops.quantized_decomposed
S8 = (0.03, 3, -128, 127, torch.int8)

Case = tuple[nn.Module, tuple[Any, ...], LoweringRules, str, str]


def _float_layers(build: Any) -> dict[str, Case]:
    class LSTM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.lstm(x)[0]
            return result

    x, rules = torch.randn(3, 4, 5), build.rules
    bmm = build.function(lambda _, a, b: torch.bmm(a, b))
    matmul = build.function(lambda _, a, b: torch.matmul(a, b))
    reason = "has no int8 kernel in this release"
    return {
        "conv_transpose": (nn.ConvTranspose2d(3, 2, 3), (x,), rules, "conv_transpose2d", reason),
        "lstm": (LSTM(), (torch.randn(3, 2, 4),), rules, "lstm", reason),
        "bmm": (bmm, (x, x.mT), rules, "bmm", reason),
        "matmul": (matmul, (x, x.mT), rules, "matmul", reason),
    }


def _forms_outside_the_rules(build: Any) -> dict[str, Case]:
    def case(form: str, reason: str, *, allowed: dict[str, Any], **options: Any) -> Case:
        layer = nn.Linear(16, 12) if form == "linear" else nn.Conv2d(8, 12, 3)
        x = torch.randn(5, 16) if form == "linear" else torch.randn(1, 8, 6, 6)
        module = build.quantized(layer, **options)
        return module, (x,), replace(build.rules, **allowed), form, reason

    some = frozenset
    return {
        "op": case("conv2d", "backend has no int8 kernel for conv2d", allowed={"ops": some({"linear"})}),
        "s8": case("linear", "its activations are torch.int8; the kernels take torch.uint8", allowed={}, activation=S8),
        "per channel": case("linear", "quantized per_channel, for which", allowed={"weight_granularities": some({"per_tensor"})}),
        "per tensor": case("conv2d", "quantized per_tensor, for which", allowed={"weight_granularities": some({"per_channel"})}, is_per_channel=False),
        "dynamic": case("conv2d", "no conv2d kernel for dynamic activations", allowed={"dynamic_ops": some({"linear"})}, is_dynamic=True),
    }  # fmt: skip


def _asymmetric_padding(build: Any) -> dict[str, Case]:
    def case(*, is_per_channel: bool) -> Case:
        module = build.quantized(nn.Conv2d(8, 12, 4, padding="same"), is_per_channel=is_per_channel)
        x = torch.randn(1, 8, 6, 6)
        return module, (x,), build.rules, "conv2d", "padding='same' needs asymmetric padding"

    return {
        "padding": case(is_per_channel=True),
        "padding, per tensor": case(is_per_channel=False),
    }


def _linears_of_another_kind(build: Any) -> dict[str, Case]:
    through, dequantized = build.through_int8, build.dequantized
    x, buffers = torch.randn(5, 16), build.int8_weight(12, 16)
    shifted = {**buffers, "zero_points": torch.ones(12, dtype=torch.int64)}
    float_weight = torch.randn(12, 16)

    def case(
        function: Callable[..., Any], reason: str, *inputs: Tensor, **replaced: Tensor
    ) -> Case:
        module = build.function(function, **{**buffers, **replaced})
        return module, (x, *inputs), build.rules, "linear", reason

    def per_tensor(
        zero_point: int, dtype: torch.dtype, low: int, high: int
    ) -> Callable[..., Tensor]:
        return lambda b, x: F.linear(
            through(x), qd.dequantize_per_tensor(b.weight, 0.01, zero_point, low, high, dtype)
        )

    def along_inputs(b: Any, x: Tensor) -> Tensor:
        weight = (b.weight, b.scales, b.zero_points, 1, -127, 127, torch.int8)
        return F.linear(through(x), qd.dequantize_per_channel(*weight))

    def weight_as_input(b: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight = qd.dequantize_per_channel(
            weight, b.scales, b.zero_points, 0, -127, 127, torch.int8
        )
        return F.linear(through(x), weight)

    def written(b: Any, x: Tensor) -> Tensor:
        x = through(x)
        y = F.linear(x, dequantized(b))
        x.mul_(2)
        return y + x.sum()

    def written_through_a_view(b: Any, x: Tensor) -> Tensor:
        x = through(x)
        y = F.linear(x, dequantized(b))
        x.view(-1).mul_(2)
        return y + x.sum()

    def half(b: Any, x: Tensor) -> Tensor:
        half = torch.bfloat16
        return F.linear(through(x, out_dtype=half), dequantized(b, out_dtype=half))

    u8_weight = {"weight": torch.randint(0, 255, (12, 16), dtype=torch.uint8)}
    square = {
        "weight": buffers["weight"][:12, :12].clone(),
    }
    return {
        "input": case(lambda b, x: F.linear(x, dequantized(b)), "its input is not quantized"),
        "weight": case(lambda b, x: F.linear(through(x), b.plain), "its weight is not quantized", plain=float_weight),
        "shifted weight": case(lambda b, x: F.linear(through(x), dequantized(b)), "not symmetric over constant output channels", **shifted),
        "weight along inputs": (build.function(along_inputs, **{**buffers, **square}), (torch.randn(5, 12),), build.rules, "linear", "not symmetric"),
        "shifted weight, per tensor": case(per_tensor(3, torch.int8, -128, 127), "its weight has zero_point 3"),
        "u8 weight": case(per_tensor(0, torch.uint8, 0, 255), "its weight is torch.uint8; the kernels take int8", **u8_weight),
        "weight as input": case(weight_as_input, "its weight is an input of the graph", buffers["weight"]),
        "bias": case(lambda b, x: F.linear(through(x), dequantized(b), b.bias * 2), "bias is computed at run time"),
        "bias, per tensor": case(lambda b, x: F.linear(through(x), qd.dequantize_per_tensor(b.weight, 0.01, 0, -127, 127, torch.int8), b.bias * 2), "bias is computed at run time"),
        "written": case(written, "an op writes to its dequantized input in place"),
        "written through a view": case(written_through_a_view, "an op writes to its dequantized input in place"),
        "bf16": case(half, "it computes in torch.bfloat16; only float32 is supported"),
    }  # fmt: skip


DECLINED = (
    "conv_transpose lstm bmm matmul",
    "op|s8|per channel|per tensor|dynamic|padding|padding, per tensor|input|weight|shifted weight",
    "weight along inputs|shifted weight, per tensor|u8 weight|weight as input|bias|bias, per tensor",
    "written|written through a view|bf16",
)
NAMES = [*DECLINED[0].split(), *"|".join(DECLINED[1:]).split("|")]


def _cases(build: Any) -> dict[str, Case]:
    return {
        **_float_layers(build),
        **_forms_outside_the_rules(build),
        **_asymmetric_padding(build),
        **_linears_of_another_kind(build),
    }


def test_the_list_of_declined_cases_is_whole(build: Any) -> None:
    assert list(_cases(build)) == NAMES


@pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm:UserWarning")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_declined_with_its_reason_and_left_as_it_was(name: str, build: Any) -> None:
    module, inputs, rules, op, reason = _cases(build)[name]
    exported = build.export(module, *inputs)
    before = str(exported.graph)

    record = Int8Lowering(rules)(exported.graph)

    assert record.lowered == ()
    assert [(declined.op, reason in declined.reason) for declined in record.declined] == [
        (op, True)
    ], record
    assert str(exported.graph) == before


def test_what_is_declined_is_in_graph_order(build: Any) -> None:
    module = build.export(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    record = Int8Lowering(build.rules)(module.graph)
    assert [op.node for op in record.declined] == ["linear", "linear_1"]
    assert [op.module_path for op in record.declined] == ["0", "1"]
