"""Products of int8 matrices, natively.

x86's kernel for int8 activations adds pairs of products in 16 bits, where there is no VNNI. It never saturates here:
weights of at most 60 with activations near 0, weights of 127 with a range of 7 bits, or every second weight 0.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

from versatil_passes import (
    DecomposeQuantization,
    Int8Lowering,
    LoweringRecord,
    LoweringRules,
    OneDNNKernels,
    QuantLiftUp,
    pre_grad_passes,
)
from versatil_passes.gemm_kernels import GemmKernels, columns_bytes, run
from versatil_passes.int8_ops import Int8Call

RULES = LoweringRules(
    machine_types=("x86_64", "aarch64"),
    activation_dtypes=(torch.int8, torch.uint8),
    dynamic_ops=frozenset({"linear", "conv1d", "conv2d"}),
    post_ops={op: frozenset({"relu"}) for op in ("linear", "conv1d", "conv2d")},
    allow_int8_output=False,
    kernels="gemm",
)
U8 = (0.0625, 64, 0, 127, torch.uint8)
S8 = (0.0625, -64, -128, -1, torch.int8)
FULL_U8 = (0.03125, 128, 0, 255, torch.uint8)
FULL_S8 = (0.03125, 3, -128, 127, torch.int8)
# Kernel size, stride, padding, dilation.
GEOMETRIES = [
    (1, 1, 0, 1),
    (1, 2, 0, 1),
    (1, 1, 1, 1),
    (1, 3, 2, 1),
    (2, 2, 1, 1),
    (3, 1, 1, 1),
    (3, 2, 1, 1),
    (3, 1, 2, 2),
    (3, 2, 3, 3),
    (5, 3, 0, 1),
]
Geometry = tuple[list[int], list[int], list[int], int]
Shape = tuple[int, ...]
# Input, weight, geometry.
Layer = tuple[Shape, Shape, Geometry | None]


def _convolution(dimensions: int, geometry: tuple[int, int, int, int]) -> Layer:
    size, stride, padding, dilation = geometry
    images, weight = (2, 6, 11, 13)[: 2 + dimensions], (8, 6, *[size] * dimensions)
    return images, weight, ([stride] * dimensions, [padding] * dimensions, [dilation] * dimensions, 1)  # fmt: skip


LAYERS: dict[str, Layer] = {
    "linear": ((5, 16), (8, 16), None),
    "linear of one row": ((16,), (8, 16), None),
    "linear of 3 dimensions": ((2, 5, 16), (8, 16), None),
    "linear of 4 dimensions": ((2, 3, 5, 16), (8, 16), None),
    **{f"conv1d {geometry}": _convolution(1, geometry) for geometry in GEOMETRIES},
    **{f"conv2d {geometry}": _convolution(2, geometry) for geometry in GEOMETRIES},
    "conv2d, two axes": ((2, 6, 11, 13), (8, 6, 1, 5), ([1, 2], [0, 2], [1, 1], 1)),
    "conv2d, two other axes": ((2, 6, 11, 13), (8, 6, 3, 2), ([2, 1], [3, 1], [1, 4], 1)),
    "conv2d of one position": ((1, 6, 3, 3), (8, 6, 3, 3), ([1, 1], [0, 0], [1, 1], 1)),
}


def _call(
    layer: Layer,
    dtype: torch.dtype,
    *,
    is_per_channel: bool = True,
    is_dynamic: bool = False,
    has_bias: bool = True,
) -> Int8Call:
    image, weight, geometry = layer
    low, zero_point = (-17, 3) if dtype is torch.int8 else (100, 120)
    scale: Any = 0.1
    if is_dynamic:
        scale, zero_point = torch.tensor([0.1], dtype=torch.float64), torch.tensor([zero_point])  # type: ignore[assignment] # as measured
    return Int8Call(
        torch.randint(low, low + 40, image, dtype=torch.int32).to(dtype),
        scale,
        zero_point,
        torch.randint(-60, 61, weight, dtype=torch.int8),
        torch.rand(8 if is_per_channel else 1) * 0.1 + 0.01,
        torch.randn(8) if has_bias else None,
        geometry,
    )


def _expected(call: Int8Call) -> Tensor:
    x = (call.qx.double() - float(call.x_zero_point)) * float(call.x_scale)
    weight = call.weight.double() * call.w_scale.double().view(-1, *[1] * (call.weight.dim() - 1))
    bias = None if call.bias is None else call.bias.double()
    if call.geometry is None:
        return F.linear(x, weight, bias)
    convolve: Callable[..., Tensor] = F.conv2d if call.weight.dim() == 4 else F.conv1d
    return convolve(x, weight, bias, *call.geometry)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_what_it_is_defined_as(name: str, dtype: torch.dtype, build: Any) -> None:
    for is_per_channel, is_dynamic, has_bias in itertools.product((True, False), repeat=3):
        call = _call(
            LAYERS[name],
            dtype,
            is_per_channel=is_per_channel,
            is_dynamic=is_dynamic,
            has_bias=has_bias,
        )
        before = call.qx.clone(), call.weight.clone()

        result = run(call)

        build.assert_exact(result, _expected(call).float())
        assert torch.equal(call.qx, before[0])
        assert torch.equal(call.weight, before[1])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_border_stands_for_zero(dtype: torch.dtype, *, is_dynamic: bool) -> None:
    """An image of zero points is an image of zeros: the bias is all that is left, at its border too."""
    call = _call(LAYERS["conv2d (3, 1, 2, 2)"], dtype, is_dynamic=is_dynamic)
    call.qx.fill_(int(call.x_zero_point))

    assert torch.equal(run(call), call.bias.view(8, 1, 1).expand(2, 8, 11, 13))


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("conv")])
def test_the_columns_take_the_memory_that_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _call(LAYERS[name], torch.int8)
    result = run(call)
    made: list[int] = []
    cat = torch.ops.aten.cat.default

    def emit(operator: Any, *args: Any) -> Any:
        value = operator(*args)
        if operator is cat:
            made.append(value.numel() * value.element_size())
        return value

    monkeypatch.setattr("versatil_passes.gemm_kernels.call_now", emit)
    run(call)

    assert columns_bytes(call, result.shape) * len(call.qx) == sum(made)
    assert bool(made) is not call.is_one_by_one


def _lower(module: GraphModule) -> LoweringRecord:
    lowering = Int8Lowering(RULES)
    record = lowering(module.graph)
    kernels = lowering.kernels(allow_in_place=False)
    assert isinstance(kernels, GemmKernels)
    assert kernels(module.graph) == len(record.lowered)
    module.graph.lint()
    module.recompile()
    assert "versatil." not in str(module.graph)
    return record


FORMS: dict[str, tuple[str, Any]] = {
    "linear": ("linear", {}),
    "linear, 3 dimensions": ("linear", {"shape": (2, 5, 16)}),
    "linear, one row": ("linear", {"shape": (16,)}),
    "linear, relu and quantize": ("linear", {"post_op": F.relu, "output": U8, "post_ops": ("relu",)}),
    "linear, residual": ("linear", {"residual": "input", "post_op": F.gelu}),
    "linear, relu": ("linear", {"post_op": F.relu, "post_ops": ("relu",)}),
    "conv1d, relu": ("conv1d", {"post_op": F.relu, "post_ops": ("relu",)}),
    "conv2d, relu": ("conv2d", {"post_op": F.relu, "post_ops": ("relu",), "geometry": {"padding": 1}}),
    "conv1d": ("conv1d", {"geometry": {"padding": 1, "stride": 2}}),
    "conv1d, same": ("conv1d", {"geometry": {"padding": "same", "dilation": 2}}),
    "conv2d": ("conv2d", {"geometry": {"stride": (2, 1), "padding": (0, 2)}}),
    "conv2d, channels last": ("conv2d", {"is_channels_last": True}),
    "conv2d, pointwise": ("conv2d", {"kernel": 1, "geometry": {"stride": 2}}),
    "conv2d, dilation": ("conv2d", {"geometry": {"dilation": (1, 2), "padding": 1}}),
    "conv2d, valid": ("conv2d", {"geometry": {"padding": "valid", "stride": 2}}),
    "conv2d, residual": ("conv2d", {"residual": "quantized", "post_op": F.relu, "output": U8}),
    "conv2d, no bias": ("conv2d", {"geometry": {"bias": False}}),
}  # fmt: skip


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("activation", [FULL_U8, FULL_S8], ids=["u8", "s8"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_in_a_graph_equals_its_reference(
    name: str, activation: Any, build: Any, *, is_dynamic: bool
) -> None:
    kind, options = FORMS[name]
    quantization = {
        "activation": activation,
        "is_dynamic": is_dynamic,
        "is_per_channel": is_dynamic is (activation is FULL_U8),
        "is_pair_safe": True,
    }
    module, inputs = getattr(build, kind)(**options, **quantization).build()
    before = [value.clone() for value in inputs]
    with torch.no_grad():
        expected = module(*inputs)

        (op,) = _lower(module).lowered

        build.assert_exact(module(*inputs), expected)
    assert (op.kernel, op.post_ops) == ("onednn.qlinear_pointwise", options.get("post_ops", ()))
    assert all(torch.equal(old, new) for old, new in zip(before, inputs, strict=True))


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d, dilation", "conv2d, pointwise"])
def test_a_bound_layer_has_the_value_of_its_neutral_operator(name: str, build: Any) -> None:
    """Inductor's later passes read shapes, dtypes and strides."""
    kind, options = FORMS[name]
    module, inputs = getattr(build, kind)(**options).build()
    _lower(module)

    value = module.graph.output_node().args[0][0].meta["val"]

    result = module(*inputs)
    assert (value.shape, value.dtype, value.stride()) == (
        result.shape,
        result.dtype,
        result.stride(),
    )


@pytest.mark.parametrize("is_per_channel", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_relu_joins_the_kernel_where_a_weight_has_one_scale(
    build: Any, *, is_per_channel: bool, is_dynamic: bool
) -> None:
    """With a scale for each channel, relu has to wait for them."""
    options = {"is_per_channel": is_per_channel, "is_dynamic": is_dynamic}
    module, inputs = build.linear(post_op=F.relu, **options).build()
    expected = module(*inputs)

    assert [op.post_ops for op in _lower(module).lowered] == [("relu",)]

    build.assert_exact(module(*inputs), expected)
    (kernel,) = [node for node in module.graph.nodes if "qlinear" in str(node.target)]
    behind = [str(node.target) for node in module.graph.nodes if node > kernel]
    assert ("aten.relu.default" in behind) is is_per_channel


def test_nodes_tell_which_node_they_stand_for(build: Any) -> None:
    module, _ = build.linear().build()
    _lower(module)
    (node,) = [node for node in module.graph.nodes if "lowered_as" in node.meta]
    assert node.meta["replaces"] == "linear"
    assert node is module.graph.output_node().args[0][0]


def test_layers_share_what_is_equal(build: Any) -> None:
    def function(buffers: Any, x: Tensor) -> Any:
        weight = build.dequantized(buffers)
        return [F.linear(build.through_int8(x, params), weight) for params in (U8, S8)]

    x = torch.randn(5, 16)
    module = build.export(build.function(function, **build.int8_weight(12, 16)), x)
    saved = set(module.state_dict())
    expected = module(x)

    assert len(_lower(module).lowered) == 2

    made = sorted(name for name, _ in module.named_buffers() if name.startswith("_"))
    assert made == ["_ones_1", "_weight_0", "_zeros_2"]
    assert set(module.state_dict()) == saved
    assert not module.graph.find_nodes(op="get_attr", target="weight")
    for result, wanted in zip(module(x), expected, strict=True):
        build.assert_exact(result, wanted)


def test_a_weight_that_is_no_constant_stays_neutral(build: Any) -> None:
    module, inputs = build.linear().build()
    expected = module(*inputs)
    Int8Lowering(RULES)(module.graph)
    (weight,) = [node for node in module.graph.nodes if node.target == "weight"]
    with module.graph.inserting_after(weight):
        copy = module.graph.call_function(torch.ops.aten.clone.default, (weight,))
    weight.replace_all_uses_with(copy, lambda user: user is not copy)

    assert GemmKernels()(module.graph) == 0

    module.graph.lint()
    module.recompile()
    build.assert_exact(module(*inputs), expected)


def test_what_another_backend_lowered_is_left_to_its_kernels(build: Any) -> None:
    """A process may hold the passes of two: nothing of what the kernel cannot do is dropped."""
    forms = "linear_gelu conv2d_groups conv2d_int8 linear_int8_narrow conv2d_add_relu linear_add"
    for name in forms.split():
        module, inputs = build.forms[name].build()
        expected = module(*inputs)
        assert len(Int8Lowering(build.rules)(module.graph).lowered) == 1

        assert GemmKernels()(module.graph) == 0

        assert OneDNNKernels()(module.graph) == 1
        module.recompile()
        build.assert_exact(module(*inputs), expected)


def test_a_convolution_of_dynamic_size_is_left_to_another(build: Any) -> None:
    layer = build.quantized(nn.Conv2d(8, 12, 3))
    shapes = {"x": {2: torch.export.Dim("height", min=4, max=64)}}
    module = build.export(layer, torch.randn(2, 8, 9, 6), dynamic_shapes=shapes)
    assert len(Int8Lowering(build.rules)(module.graph).lowered) == 1
    assert GemmKernels()(module.graph) == 0


def test_the_uuid_is_its_own(build: Any) -> None:
    assert GemmKernels().uuid() == GemmKernels().uuid()
    assert GemmKernels().uuid() != Int8Lowering(build.rules).post_grad_pass.uuid()


def test_a_dynamic_batch(build: Any) -> None:
    layer = build.quantized(nn.Conv2d(8, 12, 3, padding=1, stride=2), activation=S8)
    batch = torch.export.Dim("batch", min=2, max=64)
    module = build.export(layer, torch.randn(3, 8, 9, 6), dynamic_shapes={"x": {0: batch}})
    more = torch.randn(7, 8, 9, 6)
    expected = module(more)

    assert len(_lower(module).lowered) == 1

    build.assert_exact(module(more), expected)


class Layers(nn.Module):
    """A 3x3 and a 1x1 convolution, static and dynamic, and linears, with what is fused around them."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        self.conv = build.quantized(nn.Conv2d(8, 12, 3, padding=1, stride=2), activation=S8)
        self.dynamic = build.quantized(nn.Conv2d(12, 12, 3, padding=1), is_dynamic=True)
        self.pointwise = build.quantized(nn.Conv2d(12, 16, 1), activation=U8)
        self.linear = build.quantized(nn.Linear(16, 12), activation=U8, is_per_channel=False)
        full = {"activation": FULL_S8, "is_pair_safe": True}
        self.head = build.quantized(nn.Linear(12, 5), is_dynamic=True, **full)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        x = self.pointwise(self.dynamic(x) + x)
        x = F.gelu(self.linear(x.mean((2, 3))))
        result: Tensor = self.head(x)
        return result


@pytest.mark.sizes_before_autograd
def test_compiled_models_run_one_product_for_each_layer(build: Any) -> None:
    x = torch.randn(2, 8, 12, 10)
    module = build.export(Layers(build), x)
    passes = QuantLiftUp(), Int8Lowering(RULES), DecomposeQuantization()
    settings = {"freezing": True, "fx_graph_cache": False}

    with torch.no_grad(), torch._inductor.config.patch(settings), pre_grad_passes(*passes):
        expected = module(x)
        result, [code] = run_and_get_code(torch.compile(module), x)

    build.assert_exact(result, expected)
    kernels = re.findall(r"torch\.ops\.onednn\.(\w+)\.\w+\(", code)
    assert kernels == ["qlinear_pointwise"] * 5
    assert "torch.ops.versatil" not in code
    assert "aten.convolution" not in code
