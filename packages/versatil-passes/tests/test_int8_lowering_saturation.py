"""The record says of every int8 layer whether its kernel may saturate, where the rules ask for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from versatil_passes import Int8Lowering, SaturatingPairs

PAIRS = SaturatingPairs(accumulator_max=32767, uncut_features=256)


@pytest.mark.parametrize(
    ("activation", "pair_sum", "limit", "may_saturate"),
    [
        ("full", 129, 128, True),
        ("full", 128, 128, False),
        ("full", 254, 128, True),
        ("narrow", 254, 258, False),
    ],
)
def test_the_record_says_whether_a_kernel_may_saturate(
    build: Any, activation: str, pair_sum: int, limit: int, *, may_saturate: bool
) -> None:
    buffers = build.int8_weight(3, 6)
    buffers["weight"] = torch.zeros(3, 6, dtype=torch.int8)
    buffers["weight"][1, 2:4] = torch.tensor([-127, 127 - pair_sum], dtype=torch.int8)
    quant_max = 255 if activation == "full" else 127

    def function(buffers: Any, x: Tensor) -> Tensor:
        x = build.through_int8(x, (0.03, 3, 0, quant_max, torch.uint8))
        return F.relu(F.linear(x, build.dequantized(buffers)))

    module = build.export(build.function(function, **buffers), torch.randn(5, 6))
    lowering = Int8Lowering(replace(build.rules, saturating_pairs=PAIRS))

    (op,) = lowering(module.graph).lowered

    assert (op.pair_sum, op.pair_limit, op.may_saturate) == (pair_sum, limit, may_saturate)
    assert str(op) == "linear + relu -> float32"


@pytest.mark.parametrize("op_name", ["linear", "conv1d", "conv2d"])
@pytest.mark.parametrize("is_per_channel", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_every_int8_layer_has_a_pair_sum(
    build: Any, op_name: str, *, is_per_channel: bool, is_dynamic: bool
) -> None:
    options = {"is_per_channel": is_per_channel, "is_dynamic": is_dynamic}
    module, _ = getattr(build, op_name)(**options).build()
    (weight,) = [value for value in module.buffers() if value.dtype is torch.int8]

    (op,) = Int8Lowering(replace(build.rules, saturating_pairs=PAIRS))(module.graph).lowered

    assert op.pair_sum == int(PAIRS.largest_sums(weight).max()) > 128
    assert op.pair_limit == 258


def test_without_the_rule_nothing_is_said_about_saturation(build: Any) -> None:
    module, _ = build.linear().build()

    (op,) = Int8Lowering(build.rules)(module.graph).lowered

    assert (op.pair_sum, op.pair_limit, op.may_saturate) == (None, None, False)


def test_a_layer_without_output_channels_has_no_pair(build: Any) -> None:
    def function(buffers: Any, x: Tensor) -> Tensor:
        return F.linear(build.through_int8(x), build.dequantized(buffers))

    buffers = build.int8_weight(0, 6)
    module = build.export(build.function(function, **buffers), torch.randn(5, 6))

    (op,) = Int8Lowering(replace(build.rules, saturating_pairs=PAIRS))(module.graph).lowered

    assert (op.pair_sum, op.may_saturate) == (0, False)
