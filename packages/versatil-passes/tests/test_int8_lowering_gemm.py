"""What the lowering takes and declines where the kernel is a product of int8 matrices."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from versatil_passes import Int8Lowering, LoweringRules, OneDNNKernels
from versatil_passes.gemm_kernels import GemmKernels

RULES = LoweringRules(
    machine_types=("aarch64",),
    activation_dtypes=(torch.int8, torch.uint8),
    dynamic_ops=frozenset({"linear", "conv1d", "conv2d"}),
    post_ops={op: frozenset({"relu"}) for op in ("linear", "conv1d", "conv2d")},
    allow_int8_output=False,
    kernels="gemm",
    kernel_class="lowp_gemm:acl",
)


def test_the_rules_choose_the_second_half(build: Any) -> None:
    assert isinstance(Int8Lowering(RULES).post_grad_pass, GemmKernels)
    assert isinstance(Int8Lowering(build.rules).post_grad_pass, OneDNNKernels)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("linear", 0),
        ("conv1d", 3 * 8 * 8),  # 3 positions, 8 channels, 8 results in a row
        ("conv2d", 9 * 8 * 8 * 7),
        ("conv2d_stride_padding", 9 * 8 * 4 * 11),
        ("conv2d_pointwise", 0),
    ],
)
def test_the_record_names_kernel_class_and_columns(name: str, columns: int, build: Any) -> None:
    module, _ = build.forms[name].build()
    (op,) = Int8Lowering(RULES)(module.graph).lowered
    assert op.op == name.split("_", maxsplit=1)[0]
    assert (op.kernel, op.kernel_class) == ("onednn.qlinear_pointwise", "lowp_gemm:acl")
    assert op.columns_bytes == columns


def test_other_kernels_have_neither(build: Any) -> None:
    module, _ = build.conv2d().build()
    (op,) = Int8Lowering(build.rules)(module.graph).lowered
    assert (op.kernel_class, op.columns_bytes) == ("", 0)


def test_nothing_but_relu_is_fused_into_the_product(build: Any) -> None:
    module, _ = build.conv2d(residual="quantized", post_op=F.relu, output=build.wide).build()
    (op,) = Int8Lowering(RULES)(module.graph).lowered
    assert (op.post_ops, op.output_dtype, op.replaces) == ((), torch.float32, ("conv2d",))

    module, _ = build.conv2d(post_op=F.relu, output=build.wide).build()
    (op,) = Int8Lowering(RULES)(module.graph).lowered
    assert (op.post_ops, op.output_dtype) == (("relu",), torch.float32)


def _declined(module: Any, rules: LoweringRules) -> str:
    before = str(module.graph)
    record = Int8Lowering(rules)(module.graph)
    assert record.lowered == ()
    assert str(module.graph) == before
    (op,) = record.declined
    return op.reason


@pytest.mark.parametrize(
    ("name", "groups"), [("conv2d_groups", 2), ("conv2d_depthwise", 8), ("conv1d_depthwise", 8)]
)
def test_groups_stay_float(name: str, groups: int, build: Any) -> None:
    module, _ = build.forms[name].build()
    assert _declined(module, RULES).startswith(f"it has {groups} groups; the backend's kernel")


def test_columns_up_to_the_limit(build: Any) -> None:
    size = 9 * 8 * 8 * 7
    module, _ = build.conv2d().build()
    assert len(Int8Lowering(replace(RULES, columns_bytes_max=size))(module.graph).lowered) == 1


def test_larger_columns_stay_float(build: Any) -> None:
    layer = build.quantized(nn.Conv2d(8, 12, 3))
    module = build.export(layer, torch.randn(5, 8, 102, 102))
    reason = _declined(module, replace(RULES, columns_bytes_max=719_999))
    assert "takes 720 kB for each image, more than the backend allows (720 kB)" in reason


def test_a_pointwise_convolution_and_a_linear_have_no_limit(build: Any) -> None:
    rules = replace(RULES, columns_bytes_max=0)
    for name in ("conv2d_pointwise", "linear"):
        module, _ = build.forms[name].build()
        assert len(Int8Lowering(rules)(module.graph).lowered) == 1


SIZES = {"batch": 0, "height": 2, "width": 3}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", [1, 3])
def test_dynamic_sizes(size: str, kernel: int, build: Any) -> None:
    """The columns are cut out at fixed places: only the batch may vary, or a 1x1 convolution."""
    layer = build.quantized(nn.Conv2d(8, 12, kernel))
    shapes = {"x": {SIZES[size]: torch.export.Dim(size, min=4, max=64)}}
    module = build.export(layer, torch.randn(6, 8, 12, 12), dynamic_shapes=shapes)
    if kernel == 1 or size == "batch":
        shape = [6, 8, 12, 12]
        shape[SIZES[size]] = 9
        x = torch.randn(shape)
        expected = module(x)
        assert len(Int8Lowering(RULES)(module.graph).lowered) == 1
        assert GemmKernels()(module.graph) == 1
        module.recompile()
        build.assert_exact(module(x), expected)
    else:
        reason = _declined(module, RULES)
        assert "its spatial sizes are dynamic" in reason
        assert "a dynamic batch size is fine" in reason


def test_a_convolution_of_unknown_size_stays_float(build: Any) -> None:
    module, _ = build.conv2d().build()
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    assert "its spatial sizes are dynamic" in _declined(module, RULES)
