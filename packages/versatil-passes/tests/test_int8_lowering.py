from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from versatil_passes import Int8Lowering, LoweringRules, OneDNNKernels

qd = torch.ops.quantized_decomposed
S8 = (0.03, 3, -128, 127, torch.int8)


def test_golden_graphs(
    form: Any,
    build: Any,
    check_golden: Callable[[str, str], None],
    request: pytest.FixtureRequest,
) -> None:
    """Each form becomes one int8 operator, and then the kernel that compiled models run."""
    module, _ = form.build()

    record = Int8Lowering(build.rules)(module.graph)
    lowered = build.describe(module.graph)
    OneDNNKernels()(module.graph)

    (op,) = record.lowered
    assert (op.post_ops, op.output_dtype) == (form.post_ops, form.output_dtype)
    assert record.declined == ()
    kernels = build.describe(module.graph)
    check_golden(
        request.node.callspec.id,
        f"{op}\n\n# after Int8Lowering\n{lowered}\n# after OneDNNKernels\n{kernels}",
    )


def test_every_golden_graph_has_its_form(build: Any) -> None:
    assert {path.stem for path in build.golden.glob("*")} == build.forms.keys()


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
    before = build.describe(module.graph)

    record = lowering(module.graph)

    assert (record.lowered, record.declined) == ((), ())
    assert build.describe(module.graph) == before


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
    assert "dequantize" not in build.describe(module.graph)


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
    assert "binary" in build.describe(module.graph)


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


NOT_FOLDED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "linear gelu": ("linear", {"post_op": nn.GELU()}, ("gelu",)),
    "linear silu": ("linear", {"post_op": nn.SiLU()}, ("silu",)),
    "conv2d silu": ("conv2d", {"post_op": nn.SiLU()}, ("silu",)),
    "conv2d hardswish": ("conv2d", {"post_op": nn.Hardswish()}, ("hardswish",)),
    "conv1d": ("conv1d", {}, ()),
    "conv1d relu": ("conv1d", {"post_op": F.relu}, ("relu",)),
}


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_a_narrow_output_that_no_clamp_can_express_is_not_fused(name: str, build: Any) -> None:
    """Case 30: the kernel would clamp to its dtype's range instead."""
    op_name, options, post_ops = NOT_FOLDED[name]
    module, inputs = getattr(build, op_name)(output=build.tight, **options).build()
    expected = module(*inputs)
    assert int(expected.max()) == 127  # values beyond the range are there to be clamped

    (op,) = build.lower(module).lowered

    assert (op.post_ops, op.output_dtype) == (post_ops, torch.float32)
    build.assert_exact(module(*inputs), expected)


def test_an_int8_residual_with_a_narrow_output_is_clamped(build: Any) -> None:
    module, inputs = build.conv2d(residual="quantized", output=build.tight).build()
    expected = module(*inputs)
    build.lower(module, allow_in_place=True)
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
    assert "binary" in build.describe(module.graph)
    build.assert_exact(module(*more), expected)


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
        "conv3d": (nn.Conv3d(1, 2, 3), (torch.randn(1, 1, 4, 4, 4),), rules, "conv3d", reason),
        "conv_transpose": (nn.ConvTranspose2d(3, 2, 3), (x,), rules, "conv_transpose2d", reason),
        "lstm": (LSTM(), (torch.randn(3, 2, 4),), rules, "lstm", reason),
        "embedding": (nn.Embedding(7, 3), (torch.arange(5),), rules, "embedding", reason),
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
        "bf16": case(half, "it computes in torch.bfloat16; only float32 is supported"),
    }  # fmt: skip


DECLINED = (
    "conv3d conv_transpose lstm embedding bmm matmul",
    "op|s8|per channel|per tensor|dynamic|padding|padding, per tensor|input|weight|shifted weight",
    "weight along inputs|shifted weight, per tensor|u8 weight|weight as input|bias|bias, per tensor",
    "written|bf16",
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
    before = build.describe(exported.graph)

    record = Int8Lowering(rules)(exported.graph)

    assert record.lowered == ()
    assert [(declined.op, reason in declined.reason) for declined in record.declined] == [
        (op, True)
    ], record
    assert build.describe(exported.graph) == before


def test_what_is_declined_is_in_graph_order(build: Any) -> None:
    module = build.export(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    record = Int8Lowering(build.rules)(module.graph)
    assert [op.node for op in record.declined] == ["linear", "linear_1"]
    assert [op.module_path for op in record.declined] == ["0", "1"]


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
    }
    assert len(different) == 7


def test_the_uuid_does_not_depend_on_the_order_of_a_set() -> None:
    names = ["relu", "silu", "gelu", "hardtanh", "hardswish"]
    uuids = {
        Int8Lowering(
            LoweringRules(
                ("x86_64",),
                post_ops=dict.fromkeys(order, frozenset(list_of_names)),
            )
        ).uuid()
        for order in (["linear", "conv2d"], ["conv2d", "linear"])
        for list_of_names in (names, names[::-1])
    }
    assert len(uuids) == 1
