from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from versatil_passes import Int8Lowering, LoweringRules, SaturatingPairs
from versatil_passes.int8_lowering import _stable

qd = torch.ops.quantized_decomposed
S8 = (0.03, 3, -128, 127, torch.int8)
PAIRS = SaturatingPairs(accumulator_max=32767, uncut_features=256)


def test_the_record_of_what_was_lowered(build: Any) -> None:
    layer = build.quantized(nn.Linear(16, 12), post_op=F.relu, output=build.wide)
    module = build.export(nn.Sequential(nn.ReLU(), nn.Sequential(layer)), torch.randn(5, 16))
    lowering = Int8Lowering(build.rules)

    (op,) = lowering(module.graph).lowered

    assert lowering.record.lowered == (op,)
    assert (op.node, op.module_path, op.op) == ("linear", "1.0", "linear")
    assert op.replaces == ("linear", "relu_1", "quantize_per_tensor_1")
    assert (op.kernel, op.input_quant_max) == ("onednn.qlinear_pointwise", 127)
    assert not op.is_dynamic
    assert str(op) == "linear + relu -> uint8"
    (node,) = [node for node in module.graph.nodes if "lowered_as" in node.meta]
    assert node.meta["replaces"] == "quantize_per_tensor_1"


def test_a_dynamic_layer_is_recorded_as_one(build: Any) -> None:
    module, _ = build.conv2d(is_dynamic=True).build()
    (op,) = Int8Lowering(build.rules)(module.graph).lowered
    assert op.is_dynamic
    assert (op.op, op.kernel) == ("conv2d", "onednn.qconv_pointwise")


def test_a_second_run_changes_nothing(build: Any) -> None:
    module, _ = build.linear(post_op=F.relu).build()
    lowering = Int8Lowering(build.rules)
    lowering(module.graph)
    before = str(module.graph)

    record = lowering(module.graph)

    assert (record.lowered, record.declined) == ((), ())
    assert str(module.graph) == before


def test_layers_that_share_a_dequantize(build: Any) -> None:
    def two(buffers: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = build.through_int8(x)
        weight = build.dequantized(buffers)
        return F.linear(x, weight), F.relu(F.linear(x, weight, buffers.bias))

    x = torch.randn(5, 16)
    module = build.export(build.function(two, **build.int8_weight(12, 16)), x)
    expected = module(x)

    record = build.lower(module)

    assert [str(op) for op in record.lowered] == ["linear -> float32", "linear + relu -> float32"]
    for result, wanted in zip(module(x), expected, strict=True):
        build.assert_exact(result, wanted)
    assert "dequantize" not in str(module.graph)


def test_a_dequantize_that_somebody_else_reads_stays(build: Any) -> None:
    def function(buffers: Any, x: Tensor) -> Tensor:
        x = build.through_int8(x)
        return F.linear(x, build.dequantized(buffers)) + x.sum()

    x = torch.randn(5, 16)
    module = build.export(build.function(function, **build.int8_weight(12, 16)), x)
    expected = module(x)

    assert len(build.lower(module).lowered) == 1
    build.assert_exact(module(x), expected)


def test_of_two_added_layers_the_later_absorbs_the_addition(build: Any) -> None:
    def function(buffers: Any, x: Tensor) -> Tensor:
        x, weight = build.through_int8(x), build.dequantized(buffers)
        first, second = F.linear(x, weight), F.linear(x, weight, buffers.bias)
        return second + first

    x = torch.randn(5, 16)
    module = build.export(build.function(function, **build.int8_weight(12, 16)), x)
    expected = module(x)

    record = build.lower(module, allow_in_place=True)

    assert [op.post_ops for op in record.lowered] == [(), ("add",)]
    build.assert_exact(module(x), expected)
    assert "binary" in str(module.graph)


RESIDUALS_THAT_STAY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "scaled": lambda y, other: torch.add(y, other, alpha=2),
    "broadcast": lambda y, other: y + other[:1],
    "growing": lambda y, other: y + other[None].repeat(3, 1, 1),
    "a number": lambda y, _: y + 2.5,
    "itself": lambda y, _: y + y,
    "another dtype": lambda y, other: y + other.double(),
    "into the other": lambda y, other: other.sin().add_(y),
    "read twice": lambda y, other: (y + other) * y.sum(),
}


@pytest.mark.parametrize("name", RESIDUALS_THAT_STAY)
def test_additions_that_the_kernel_cannot_do_stay(name: str, build: Any) -> None:
    def function(buffers: Any, x: Tensor, other: Tensor) -> Any:
        y = F.linear(build.through_int8(x), build.dequantized(buffers), buffers.bias)
        return RESIDUALS_THAT_STAY[name](y, other)

    inputs = torch.randn(5, 16), torch.randn(5, 12)
    module = build.export(build.function(function, **build.int8_weight(12, 16)), *inputs)
    expected = module(*inputs)

    (op,) = build.lower(module).lowered

    assert op.post_ops == ()
    build.assert_exact(module(*inputs), expected)


@pytest.mark.parametrize("op_name", ["linear", "conv2d"])
def test_a_float_residual_before_an_int8_output_stays(op_name: str, build: Any) -> None:
    """Kernels add float to float or int8 to int8; of this, Inductor makes one loop."""
    make = getattr(build, op_name)
    module, inputs = make(residual="input", post_op=F.relu, output=build.wide).build()
    expected = module(*inputs)

    (op,) = build.lower(module).lowered

    assert (op.post_ops, op.output_dtype) == ((), torch.float32)
    build.assert_exact(module(*inputs), expected)


def test_an_int8_residual_whose_scale_is_one(build: Any) -> None:
    ones = (1.0, 0, 0, 255, torch.uint8)

    def function(buffers: Any, x: Tensor, other: Tensor) -> Tensor:
        y = F.conv2d(build.through_int8(x), build.dequantized(buffers), buffers.bias)
        result: Tensor = qd.quantize_per_tensor(y + build.through_int8(other, ones), *build.wide)
        return result

    inputs = torch.randn(2, 8, 6, 6), 5 * torch.rand(2, 12, 4, 4)
    module = build.export(build.function(function, **build.int8_weight(12, 8, 3, 3)), *inputs)
    expected = module(*inputs)
    build.lower(module, allow_in_place=True)
    build.assert_exact(module(*inputs), expected)


def test_a_residual_that_was_written_to_is_read_as_it_is(build: Any) -> None:
    """Dynamo's graphs go on naming the dequantize after a write to its result."""

    def function(buffers: Any, x: Tensor, other: Tensor) -> Tensor:
        residual = build.through_int8(other, build.wide)
        residual.add_(1)
        y = F.conv2d(build.through_int8(x), build.dequantized(buffers)) + residual
        result: Tensor = qd.quantize_per_tensor(y, *build.wide)
        return result

    inputs = torch.randn(2, 8, 6, 6), torch.randn(2, 12, 4, 4)
    module = build.export(build.function(function, **build.int8_weight(12, 8, 3, 3)), *inputs)
    (write,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor)
    for reader in list(write.users):
        reader.replace_input_with(write, write.args[0])
    expected = module(*inputs)
    build.lower(module)
    build.assert_exact(module(*inputs), expected)


def test_a_shortcut_through_a_convolution_without_recorded_values(build: Any) -> None:
    """``convert_pt2e`` records no value for the quantize and dequantize ops that it adds."""

    def function(buffers: Any, x: Tensor) -> Tensor:
        weight = build.dequantized(buffers)
        x = build.through_int8(x)
        y = F.conv2d(x, weight, buffers.bias)
        shortcut = build.through_int8(F.conv2d(x, weight), build.wide)
        result: Tensor = qd.quantize_per_tensor(F.relu(y + shortcut), *build.wide)
        return result

    x = torch.randn(2, 8, 6, 6)
    module = build.export(build.function(function, **build.int8_weight(12, 8, 3, 3)), x)
    for node in module.graph.nodes:
        if "quantize" in node.name:
            del node.meta["val"]
    expected = module(x)

    record = build.lower(module)

    assert [str(op) for op in record.lowered] == ["conv2d + add + relu -> uint8", "conv2d -> uint8"]
    build.assert_exact(module(x), expected)


@pytest.mark.parametrize("output", [None, (0.05, 100, 0, 255, torch.uint8)])
def test_a_view_behind_a_convolution_copies_where_it_must(output: Any, build: Any) -> None:
    """The kernel writes channels last, so that ``x.view(x.size(0), -1)`` is no view any more."""
    layer = build.quantized(nn.Conv2d(8, 12, 3), output=output)

    def function(_: Any, x: Tensor) -> Tensor:
        y = layer(x)
        return y.view(y.size(0), -1)

    module = build.function(function)
    module.layer = layer
    x = torch.randn(2, 8, 6, 6)
    exported = build.export(module, x)
    expected = exported(x)
    assert len(build.lower(exported).lowered) == 1
    build.assert_exact(exported(x), expected)


def test_a_view_that_is_written_through_is_never_a_copy(build: Any) -> None:
    def function(buffers: Any, x: Tensor, other: Tensor) -> Any:
        other = other.sin()
        other.view(-1).mul_(2)
        return F.conv2d(build.through_int8(x), build.dequantized(buffers)), other

    inputs = torch.randn(2, 8, 6, 6), torch.randn(3, 4)
    module = build.export(build.function(function, **build.int8_weight(12, 8, 3, 3)), *inputs)
    expected = module(*inputs)
    build.lower(module)
    for result, wanted in zip(module(*inputs), expected, strict=True):
        build.assert_exact(result, wanted)
    assert "aten.view.default" in str(module.graph)


def test_nothing_is_taken_from_behind_a_write(build: Any) -> None:
    """The addition reads ``other`` after something was written there; the kernel must not read it earlier."""

    def function(buffers: Any, x: Tensor, other: Tensor) -> Tensor:
        other = other.sin()
        y = F.linear(build.through_int8(x), build.dequantized(buffers))
        other.mul_(3)
        return y + other

    inputs = torch.randn(5, 16), torch.randn(5, 12)
    module = build.export(build.function(function, **build.int8_weight(12, 16)), *inputs)
    expected = module(*inputs)
    (op,) = build.lower(module).lowered
    assert op.post_ops == ()
    build.assert_exact(module(*inputs), expected)


RESTRICTIONS: dict[str, dict[str, Any]] = {
    "no post ops": {"post_ops": {}},
    "other post ops": {"post_ops": {"linear": frozenset({"silu"})}},
}


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_post_ops_outside_the_rules_stay(name: str, build: Any) -> None:
    module, inputs = build.linear(post_op=F.relu).build()
    expected = module(*inputs)
    (op,) = build.lower(module, replace(build.rules, **RESTRICTIONS[name])).lowered
    assert op.post_ops == ()
    build.assert_exact(module(*inputs), expected)


def test_residuals_outside_the_rules_stay(build: Any) -> None:
    module, inputs = build.linear(residual="input", post_op=F.relu).build()
    expected = module(*inputs)
    (op,) = build.lower(module, replace(build.rules, residual_post_ops={})).lowered
    assert op.post_ops == ()
    build.assert_exact(module(*inputs), expected)


def test_a_relu_behind_an_addition_needs_a_rule_of_its_own(build: Any) -> None:
    module, _ = build.linear(residual="input", post_op=F.relu).build()
    rules = replace(build.rules, residual_post_ops={"linear": frozenset()})
    (op,) = build.lower(module, rules).lowered
    assert op.post_ops == ("add",)


def test_int8_outputs_outside_the_rules_stay(build: Any) -> None:
    module, _ = build.linear(output=build.wide).build()
    (op,) = build.lower(module, replace(build.rules, allow_int8_output=False)).lowered
    assert op.output_dtype is torch.float32


def test_an_output_dtype_outside_the_rules_stays(build: Any) -> None:
    module, inputs = build.linear(output=S8).build()
    expected = module(*inputs)
    (op,) = build.lower(module).lowered
    assert op.output_dtype is torch.float32
    build.assert_exact(module(*inputs), expected)


@pytest.mark.dynamic_variadic
def test_symbolic_sizes(build: Any) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    layer = build.quantized(nn.Linear(16, 12), residual="computed", post_op=F.relu)
    inputs = torch.randn(5, 16), torch.randn(5, 12)
    shapes = {"x": {0: batch}, "others": ({0: batch},)}
    module = build.export(layer, *inputs, dynamic_shapes=shapes)
    more = torch.randn(9, 16), torch.randn(9, 12)
    expected = module(*more)

    (op,) = build.lower(module, allow_in_place=True).lowered

    assert op.post_ops == ("add", "relu")
    assert "binary" in str(module.graph)
    build.assert_exact(module(*more), expected)


def test_the_uuid_depends_on_every_rule() -> None:
    def uuid(**rules: Any) -> str:
        return Int8Lowering(LoweringRules(("x86_64",), **rules)).uuid()

    different = {
        uuid(),
        uuid(ops=frozenset({"linear"})),
        uuid(post_ops={"linear": frozenset({"relu"})}),
        uuid(post_ops={"conv2d": frozenset({"relu"})}),
        uuid(residual_post_ops={"conv2d": frozenset({"relu"})}),
        uuid(allow_int8_output=False),
        uuid(activation_dtypes=(torch.int8,)),
        uuid(kernels="gemm", allow_int8_output=False),
        uuid(columns_bytes_max=1000),
        uuid(columns_bytes_max=2000),
        uuid(kernel_class="lowp_gemm:acl"),
        uuid(saturating_pairs=PAIRS),
        uuid(saturating_pairs=replace(PAIRS, accumulator_max=16383)),
        uuid(saturating_pairs=replace(PAIRS, uncut_features=384)),
    }
    assert len(different) == 14


def test_the_uuid_does_not_depend_on_the_order_of_a_set() -> None:
    """That of strings differs between processes; that of 0 and 8 by which came first."""
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert list(one) != list(other)
    assert _stable(one) == _stable(other)
    assert _stable({"a": one, "b": one}) == _stable({"b": other, "a": other})
