"""Quantized references built by hand, the fused forms, the judge of numerics.

torchao is not installed where these tests run: ``Quantized`` writes the same graphs as its ``convert_pt2e``.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.fx import GraphModule

from versatil_passes import Int8Lowering, LoweringRecord, LoweringRules, OneDNNKernels

qd = torch.ops.quantized_decomposed
QuantParams = tuple[float, int, int, int, torch.dtype]

NARROW: QuantParams = (0.0625, 64, 0, 127, torch.uint8)
"""With ``reduce_range``, two products u8*s8 fit in s16: exact on every CPU."""
FULL: QuantParams = (0.03125, 128, 0, 255, torch.uint8)
TIGHT: QuantParams = (0.01, 60, 0, 127, torch.uint8)
"""A range that most results exceed, -0.6 to 0.67: whoever forgets to clamp is caught."""
WIDE: QuantParams = (0.05, 100, 0, 255, torch.uint8)
RULES = LoweringRules(
    machine_types=("x86_64", "amd64"),
    dynamic_ops=frozenset({"linear", "conv1d", "conv2d", "conv3d"}),
    post_ops={
        "linear": frozenset({"relu", "hardtanh", "hardswish", "silu", "gelu"}),
        "conv1d": frozenset({"relu"}),
        "conv2d": frozenset({"relu", "hardtanh", "hardswish", "silu"}),
        "conv3d": frozenset({"relu"}),
    },
    residual_post_ops={"linear": frozenset({"relu"}), "conv2d": frozenset({"relu"})},
)


class Quantized(nn.Module):
    """quantize, dequantize, a layer with an int8 weight, and what the options put behind it.

    Args:
        layer: A float ``Linear`` or ``Conv``; its weight is quantized here.
        post_op: Applied to the result.
        residual: How a second input is added: ``"input"``, ``"in_place"`` (``add_``), ``"computed"`` (its sine) or
            ``"quantized"`` (through a quantize and a dequantize of its own).
        output: Parameters of a quantize at the end; the result is then int8.
        activation: Parameters of the quantize in front.
        is_dynamic: Whether those are computed from the input instead.
        is_per_channel: Whether the weight has one scale per output channel.
        is_pair_safe: Whether every second input channel of the weight is zero, so that no kernel can saturate.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        post_op: Callable[[Tensor], Tensor] | None = None,
        residual: str | None = None,
        output: QuantParams | None = None,
        activation: QuantParams = NARROW,
        is_dynamic: bool = False,
        is_per_channel: bool = True,
        is_pair_safe: bool = False,
    ) -> None:
        super().__init__()
        self.conv: Any = layer if isinstance(layer, nn.modules.conv._ConvNd) else None
        self.post_op, self.residual, self.output = post_op, residual, output
        self.activation, self.is_dynamic = activation, is_dynamic
        weight, bias = (
            layer.get_parameter("weight").detach(),
            dict(layer.named_parameters()).get("bias"),
        )
        if is_pair_safe:
            weight = weight.clone()
            weight[:, 1::2] = 0
        largest = weight.abs().flatten(1).amax(1) if is_per_channel else weight.abs().max()
        scale = largest / 127
        steps = weight / scale.reshape(-1, *[1] * (weight.dim() - 1))
        self.register_buffer("weight", steps.round().to(torch.int8))
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.scale: Any = None if is_per_channel else float(scale)
        self.scales: Tensor | None
        self.register_buffer("scales", scale if is_per_channel else None)
        self.register_buffer(
            "zero_points", torch.zeros(len(weight), dtype=torch.int64) if is_per_channel else None
        )
        for name in ("weight", "bias"):  # what is left of the layer is its geometry
            setattr(layer, name, None)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        x = self.through_int8(x)
        y = self.run_layer(x, self.dequantized_weight())
        if others:
            y = self.add(y, others[0])
        if self.post_op is not None:
            y = self.post_op(y)
        return y if self.output is None else qd.quantize_per_tensor(y, *self.output)

    def through_int8(self, x: Tensor) -> Tensor:
        if not self.is_dynamic:
            return through_int8(x, self.activation)
        low, high, dtype = self.activation[2:]
        scale, zero_point = qd.choose_qparams(x, low, high, 2**-12, dtype)
        q = qd.quantize_per_tensor(x, scale, zero_point, low, high, dtype)
        return qd.dequantize_per_tensor(q, scale, zero_point, low, high, dtype)

    def dequantized_weight(self) -> Tensor:
        if self.scales is None:
            return qd.dequantize_per_tensor(self.weight, self.scale, 0, -127, 127, torch.int8)
        return dequantized(self)

    def run_layer(self, x: Tensor, weight: Tensor) -> Tensor:
        bias: Any = self.bias
        if self.conv is None:
            return F.linear(x, weight, bias)
        result: Tensor = self.conv._conv_forward(x, weight, bias)
        return result

    def add(self, y: Tensor, other: Tensor) -> Tensor:
        if self.residual == "in_place":
            return y.add_(other)
        if self.residual == "computed":
            return y + other.sin()
        if self.residual == "quantized":
            return y + through_int8(other, WIDE)
        return y + other


class Function(nn.Module):
    """A function of inputs and buffers as a module: ``function(buffers, *inputs)``."""

    def __init__(self, function: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def through_int8(x: Tensor, params: QuantParams = NARROW, **options: Any) -> Tensor:
    """Quantize and dequantize."""
    result: Tensor = qd.dequantize_per_tensor(
        qd.quantize_per_tensor(x, *params), *params, **options
    )
    return result


def int8_weight(*shape: int) -> dict[str, Tensor]:
    """Buffers of a weight with one scale for each output channel, and a float bias."""
    channels = shape[0]
    return {
        "weight": torch.randint(-127, 128, shape, dtype=torch.int8),
        "scales": torch.linspace(0.002, 0.004, channels),
        "zero_points": torch.zeros(channels, dtype=torch.int64),
        "bias": torch.linspace(-1, 1, channels),
    }


def dequantized(buffers: Any, **options: Any) -> Tensor:
    """Dequantize the weight of :func:`int8_weight`."""
    result: Tensor = qd.dequantize_per_channel(
        *(buffers.weight, buffers.scales, buffers.zero_points, 0, -127, 127, torch.int8), **options
    )
    return result


@dataclass(frozen=True)
class Form:
    """One form that a kernel computes as a whole, and what the record must say of it.

    With a residual, the module takes a second input of its result's shape.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    post_ops: tuple[str, ...] = ()
    output_dtype: torch.dtype = torch.float32
    has_residual: bool = False
    is_channels_last: bool = False

    def build(self) -> tuple[GraphModule, tuple[Tensor, ...]]:
        """Return the exported reference and inputs that reach beyond the calibrated range."""
        torch.manual_seed(0)
        module = self.make()
        x = 2 * torch.randn(self.shape)
        if self.is_channels_last:
            x = x.to(memory_format=torch.channels_last)
        inputs: tuple[Tensor, ...] = (x,)
        if self.has_residual:
            inputs = (x, torch.randn_like(module(x), dtype=torch.float32))
        return export(module, *inputs), inputs


def linear(shape: tuple[int, ...] = (5, 16), *, has_bias: bool = True, **options: Any) -> Form:
    """Form of a linear layer from 16 to 12 features."""
    return _form(lambda: nn.Linear(16, 12, bias=has_bias), shape, options)


def conv(
    kind: Any,
    size: Any,
    channels: Any = (8, 12),
    kernel: int = 3,
    *,
    geometry: Any = None,
    **options: Any,
) -> Form:
    """Form of a convolution of two images."""
    make = lambda: kind(*channels, kernel, **(geometry or {}))  # noqa: E731
    return _form(make, (2, channels[0], *size), options)


conv1d, conv2d = partial(conv, nn.Conv1d, (10,)), partial(conv, nn.Conv2d, (10, 9))
conv3d = partial(conv, nn.Conv3d, (4, 6, 5))


def _form(layer: Callable[[], nn.Module], shape: tuple[int, ...], options: dict[str, Any]) -> Form:
    post_ops = options.pop("post_ops", ())
    residual, output = options.get("residual"), options.get("output")
    return Form(
        lambda: Quantized(layer(), **options),
        shape,
        (*(("add",) if residual else ()), *post_ops),
        output[4] if output else torch.float32,
        residual is not None,
        options.pop("is_channels_last", False),
    )


RELU, HARDTANH = ("relu",), ("hardtanh",)
# fmt: off
# Forms of convolutions of one and of three dimensions.
PLAIN: dict[str, dict[str, Any]] = {
    "": {}, "_dynamic": {"is_dynamic": True}, "_same": {"geometry": {"padding": "same", "dilation": 2}},
    "_no_bias_per_tensor": {"geometry": {"bias": False}, "is_per_channel": False},
    "_relu": {"post_op": F.relu, "post_ops": RELU}, "_int8": {"output": WIDE}, "_int8_narrow": {"output": TIGHT},
    **{f"_relu{end}": {"output": output, "post_op": F.relu, "post_ops": RELU} for end, output in (("_int8", WIDE), ("_int8_narrow", TIGHT))},
}
FORMS = {
    "linear": linear(),
    "linear_3d": linear((2, 5, 16)),
    "linear_1d": linear((16,)),
    "linear_no_bias_per_tensor": linear(has_bias=False, is_per_channel=False),
    "linear_full_range": linear(activation=FULL, is_pair_safe=True),
    "linear_dynamic": linear(is_dynamic=True),
    "linear_dynamic_per_tensor": linear((2, 5, 16), is_dynamic=True, is_per_channel=False),
    "linear_dynamic_relu": linear(is_dynamic=True, post_op=F.relu, post_ops=RELU),
    "linear_dynamic_add": linear(is_dynamic=True, residual="computed"),
    "linear_dynamic_int8": linear(is_dynamic=True, output=WIDE),
    "linear_relu": linear(post_op=F.relu, post_ops=RELU),
    "linear_relu_in_place": linear(post_op=nn.ReLU(inplace=True), post_ops=RELU),
    "linear_relu6": linear(post_op=nn.ReLU6(), post_ops=HARDTANH),
    "linear_hardtanh": linear(post_op=nn.Hardtanh(-0.5, 0.75), post_ops=HARDTANH),
    "linear_clamp": linear(post_op=lambda y: y.clamp(-0.25, 1.0), post_ops=HARDTANH),
    "linear_hardswish": linear(post_op=nn.Hardswish(), post_ops=("hardswish",)),
    "linear_silu": linear(post_op=nn.SiLU(), post_ops=("silu",)),
    "linear_gelu": linear(post_op=nn.GELU(), post_ops=("gelu",)),
    "linear_gelu_tanh": linear(post_op=nn.GELU("tanh"), post_ops=("gelu_tanh",)),
    "linear_add": linear(residual="input"),
    "linear_add_in_place": linear(residual="in_place"),
    "linear_add_computed": linear(residual="computed"),
    "linear_3d_add_relu_computed": linear((2, 5, 16), residual="computed", post_op=F.relu, post_ops=RELU),
    "linear_add_relu": linear(residual="input", post_op=F.relu, post_ops=RELU),
    "linear_int8": linear(output=WIDE),
    "linear_relu_int8": linear(output=WIDE, post_op=F.relu, post_ops=RELU),
    "linear_gelu_int8": linear(output=WIDE, post_op=nn.GELU(), post_ops=("gelu",)),
    "linear_int8_narrow": linear(output=TIGHT),
    "linear_relu_int8_narrow": linear(output=TIGHT, post_op=F.relu, post_ops=RELU),
    "linear_hardtanh_int8_narrow": linear(output=TIGHT, post_op=nn.Hardtanh(-0.4, 2.0), post_ops=HARDTANH),
    "linear_gelu_int8_narrow": linear(output=TIGHT, post_op=nn.GELU(), post_ops=("gelu",)),
    "conv1d_geometry": conv1d(geometry={"stride": 2, "padding": 2, "dilation": 2, "groups": 2}),
    "conv1d_depthwise": conv1d((8, 8), geometry={"groups": 8, "padding": 1}),
    "conv1d_valid": conv1d(geometry={"padding": "valid"}),
    **{f"{name}{end}": make(**options) for name, make in (("conv1d", conv1d), ("conv3d", conv3d)) for end, options in PLAIN.items()},
    "conv2d": conv2d(),
    "conv2d_channels_last": conv2d(is_channels_last=True),
    "conv2d_pointwise": conv2d(kernel=1),
    "conv2d_no_bias_per_tensor": conv2d(geometry={"bias": False}, is_per_channel=False),
    "conv2d_full_range": conv2d(activation=FULL, is_pair_safe=True),
    "conv2d_stride_padding": conv2d(geometry={"stride": (2, 1), "padding": (0, 2)}),
    "conv2d_dilation": conv2d(geometry={"dilation": (1, 2), "padding": 1}),
    "conv2d_groups": conv2d(geometry={"groups": 2, "padding": 1}),
    "conv2d_depthwise": conv2d((8, 8), geometry={"groups": 8, "padding": 1}),
    "conv2d_same": conv2d(geometry={"padding": "same", "dilation": (1, 2)}),
    "conv2d_valid": conv2d(geometry={"padding": "valid", "stride": 2}),
    "conv2d_dynamic": conv2d(is_dynamic=True, geometry={"padding": 1}),
    "conv2d_dynamic_add_relu": conv2d(is_dynamic=True, residual="computed", post_op=F.relu, post_ops=RELU, is_channels_last=True),
    "conv2d_relu": conv2d(post_op=F.relu, post_ops=RELU),
    "conv2d_relu6": conv2d(post_op=nn.ReLU6(inplace=True), post_ops=HARDTANH),
    "conv2d_hardtanh": conv2d(post_op=nn.Hardtanh(-0.5, 0.75), post_ops=HARDTANH),
    "conv2d_clamp": conv2d(post_op=lambda y: y.clamp(-0.25, 1), post_ops=HARDTANH),
    "conv2d_hardswish": conv2d(post_op=nn.Hardswish(), post_ops=("hardswish",)),
    "conv2d_silu": conv2d(post_op=nn.SiLU(), post_ops=("silu",)),
    "conv2d_add": conv2d(residual="input"),
    "conv2d_add_in_place": conv2d(residual="in_place"),
    "conv2d_add_computed": conv2d(residual="computed", is_channels_last=True),
    "conv2d_add_relu": conv2d(residual="input", post_op=F.relu, post_ops=RELU),
    "conv2d_add_quantized_int8": conv2d(residual="quantized", output=WIDE),
    "conv2d_add_quantized_relu_int8": conv2d(residual="quantized", output=WIDE, post_op=F.relu, post_ops=RELU, is_channels_last=True),
    "conv2d_int8": conv2d(output=WIDE),
    "conv2d_relu_int8": conv2d(output=WIDE, post_op=F.relu, post_ops=RELU),
    "conv2d_silu_int8": conv2d(output=WIDE, post_op=nn.SiLU(), post_ops=("silu",)),
    "conv2d_int8_narrow": conv2d(output=TIGHT),
    "conv2d_relu_int8_narrow": conv2d(output=TIGHT, post_op=F.relu, post_ops=RELU),
    "conv2d_relu6_int8_narrow": conv2d(output=TIGHT, post_op=nn.ReLU6(), post_ops=HARDTANH),
    "conv2d_silu_int8_narrow": conv2d(output=TIGHT, post_op=nn.SiLU(), post_ops=("silu",)),
    "conv3d_geometry": conv3d(geometry={"stride": (1, 2, 1), "padding": (1, 0, 2), "groups": 2}),
    "conv2d_add_quantized_int8_narrow": conv2d(residual="quantized", output=TIGHT, is_channels_last=True),
}
# fmt: on


def export(module: nn.Module, *inputs: Any, **options: Any) -> GraphModule:
    """Export as the workflow does before it quantizes."""
    exported = torch.export.export(module, inputs, **options).module()
    assert isinstance(exported, GraphModule)
    return exported


def lower(
    module: GraphModule, rules: LoweringRules = RULES, *, allow_in_place: bool = False
) -> LoweringRecord:
    """Make ``module`` run on int8 kernels, eagerly."""
    record = Int8Lowering(rules)(module.graph)
    OneDNNKernels(allow_in_place=allow_in_place)(module.graph)
    module.graph.lint()
    module.recompile()
    return record


def assert_exact(result: Tensor, expected: Tensor) -> None:
    """Float: at least 100 dB apart from the reference. Int8: within a step, and 0.1 % of the elements differ at most."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    if not expected.dtype.is_floating_point:
        steps = (result.int() - expected.int()).abs()
        assert int(steps.max()) <= 1
        assert steps.count_nonzero() <= 0.001 * steps.numel()
        return
    noise = (result.double() - expected.double()).norm().item()
    signal = expected.double().norm().item()
    assert signal > 0
    assert noise == 0 or 20 * math.log10(signal / noise) > 100


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes golden graphs anew, to be reviewed as a diff."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Let torch warn about itself where Inductor is first imported."""
    config.addinivalue_line(
        "filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes a ``form`` on all of them."""
    if "form" in metafunc.fixturenames:
        metafunc.parametrize("form", FORMS.values(), ids=FORMS.keys())


@dataclass(frozen=True)
class Builders:
    """What test modules, which can't import this one, share."""

    forms = FORMS
    rules = RULES
    narrow, full, tight, wide = NARROW, FULL, TIGHT, WIDE
    quantized, function = Quantized, Function
    through_int8 = staticmethod(through_int8)
    int8_weight = staticmethod(int8_weight)
    dequantized = staticmethod(dequantized)
    linear = staticmethod(linear)
    conv1d, conv2d, conv3d = conv1d, conv2d, conv3d
    export = staticmethod(export)
    lower = staticmethod(lower)
    assert_exact = staticmethod(assert_exact)


@pytest.fixture(scope="session")
def build() -> Builders:
    """Return the builders."""
    return Builders()


@pytest.fixture(autouse=True)
def _same_every_time() -> Iterator[None]:
    """Seed torch, and forget what an earlier test compiled."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
