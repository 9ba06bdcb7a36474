import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

from versatil_passes import (
    DecomposeQuantization,
    Int8Lowering,
    OneDNNKernels,
    QuantLiftUp,
    gemm_kernels,
    onednn_kernels,
    pre_grad_passes,
)
from versatil_passes.int8_ops import Int8Call

qd = torch.ops.quantized_decomposed


@pytest.mark.parametrize("allow_in_place", [False, True])
def test_every_form_equals_its_reference(form: Any, build: Any, *, allow_in_place: bool) -> None:
    module, inputs = form.build()
    before = [value.clone() for value in inputs]
    with torch.no_grad():
        expected = module(*inputs)

        record = build.lower(module, allow_in_place=allow_in_place)

        assert len(record.lowered) == 1
        build.assert_exact(module(*inputs), expected)
    assert all(torch.equal(old, new) for old, new in zip(before, inputs, strict=True))


def test_neutral_operators_run_without_kernels_bound(form: Any, build: Any) -> None:
    module, inputs = form.build()
    with torch.no_grad():
        expected = module(*inputs)
        Int8Lowering(build.rules)(module.graph)
        module.recompile()
        build.assert_exact(module(*inputs), expected)


NARROW_OUTPUTS = [
    *(f"linear{op}_int8_narrow" for op in ("", "_relu", "_hardtanh", "_gelu")),
    *(f"conv{axes}d{op}_int8_narrow" for axes in (1, 3) for op in ("", "_relu")),
    *(f"conv2d{op}_int8_narrow" for op in ("", "_relu", "_relu6", "_silu", "_add_quantized")),
]


def test_the_list_of_narrow_outputs_is_whole(build: Any) -> None:
    assert set(NARROW_OUTPUTS) == {name for name in build.forms if name.endswith("narrow")}


@pytest.mark.parametrize("allow_in_place", [False, True])
@pytest.mark.parametrize("name", NARROW_OUTPUTS)
def test_a_narrow_output_is_clamped_as_in_the_reference(
    name: str, build: Any, *, allow_in_place: bool
) -> None:
    """Case 30, with inputs far beyond the calibrated range."""
    module, inputs = build.forms[name].build()
    inputs = tuple(5 * value for value in inputs)
    expected = module(*inputs)
    assert int(expected.max()) == 127
    build.lower(module, allow_in_place=allow_in_place)
    result = module(*inputs)
    assert int(result.max()) == 127
    build.assert_exact(result, expected)


def _in_place_kernels(module: GraphModule) -> list[str]:
    targets = [str(node.target) for node in module.graph.nodes]
    return [target for target in targets if "binary" in target]


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("linear_add_computed", "onednn.qlinear_pointwise.binary"),
        ("linear_dynamic_add", "onednn.qlinear_pointwise.binary_tensor"),
        ("conv2d_add_computed", "onednn.qconv2d_pointwise.binary"),
        ("conv2d_dynamic_add_relu", "onednn.qconv2d_pointwise.binary_tensor"),
        ("conv2d_add_quantized_relu_int8", "onednn.qconv2d_pointwise.binary"),
        ("conv2d_add_quantized_int8_narrow", "onednn.qconv2d_pointwise.binary"),
        ("linear_add", None),
        ("conv2d_add", None),
        ("conv2d_add_quantized_int8", None),  # the residual is not channels last
    ],
)
def test_additions_in_place_where_safe(name: str, kernel: str | None, build: Any) -> None:
    module, _ = build.forms[name].build()
    build.lower(module, allow_in_place=True)
    assert _in_place_kernels(module) == ([] if kernel is None else [kernel])


def test_additions_in_place_only_where_allowed(build: Any) -> None:
    module, _ = build.forms["linear_add_computed"].build()
    build.lower(module, allow_in_place=False)
    assert _in_place_kernels(module) == []


@pytest.mark.parametrize(("zero_point", "count"), [(64, 2), (50, 2), (0, 3)])
def test_a_weight_that_two_calls_use_is_packed_once(
    zero_point: int, count: int, build: Any
) -> None:
    """A linear's packed weight does not depend on its activations; a convolution's, on whether they have an offset."""
    second = (0.07, zero_point, 0, 127, torch.uint8)

    def function(buffers: Any, x: Tensor, image: Tensor) -> Any:
        weight, kernel = build.dequantized(buffers), build.dequantized(buffers.conv)
        return [
            layer(build.through_int8(value, params), constant, buffers.bias)
            for layer, value, constant in ((F.linear, x, weight), (F.conv2d, image, kernel))
            for params in (build.narrow, second)
        ]

    module = build.function(function, **build.int8_weight(12, 16))
    module.conv = build.function(lambda _: None, **build.int8_weight(12, 8, 3, 3))
    inputs = torch.randn(5, 16), torch.randn(2, 8, 6, 6)
    exported = build.export(module, *inputs)
    expected = exported(*inputs)

    assert len(build.lower(exported).lowered) == 4

    packed = {name for name, _ in exported.named_buffers() if name.startswith("_weight")}
    assert len(packed) == count
    for result, wanted in zip(exported(*inputs), expected, strict=True):
        build.assert_exact(result, wanted)


def test_packed_weights_are_not_saved(build: Any) -> None:
    module, _ = build.linear().build()
    before = set(module.state_dict())
    build.lower(module)
    assert set(module.state_dict()) == before


def test_a_weight_that_is_no_constant_stays_neutral(build: Any) -> None:
    module, inputs = build.linear().build()
    expected = module(*inputs)
    Int8Lowering(build.rules)(module.graph)
    (weight,) = [node for node in module.graph.nodes if node.target == "weight"]
    with module.graph.inserting_after(weight):
        copy = module.graph.call_function(torch.ops.aten.clone.default, (weight,))
    weight.replace_all_uses_with(copy, lambda user: user is not copy)

    assert OneDNNKernels()(module.graph) == 0

    module.graph.lint()
    module.recompile()
    build.assert_exact(module(*inputs), expected)


def test_how_many_were_bound_is_returned(build: Any) -> None:
    module, _ = build.linear().build()
    Int8Lowering(build.rules)(module.graph)
    assert OneDNNKernels()(module.graph) == 1
    assert OneDNNKernels()(module.graph) == 0


def test_the_uuid_covers_the_option() -> None:
    assert OneDNNKernels().uuid() != OneDNNKernels(allow_in_place=False).uuid()
    assert OneDNNKernels().uuid() == OneDNNKernels().uuid()


SIZES = st.integers(1, 9)
POST_OPS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "relu": F.relu,
    "hardtanh": nn.Hardtanh(-0.3, 0.6),
    "silu": F.silu,
    "gelu": F.gelu,
}


@st.composite
def _options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "post_op": POST_OPS[draw(st.sampled_from(list(POST_OPS)))],
        "residual": draw(st.sampled_from([None, "input", "computed", "quantized"])),
        "output": draw(
            st.sampled_from(
                [None, (0.01, 60, 0, 127, torch.uint8), (0.05, 99, 0, 255, torch.uint8)]
            )
        ),
        "is_dynamic": draw(st.booleans()),
        "is_per_channel": draw(st.booleans()),
    }


@st.composite
def _layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    batch, has_bias = draw(SIZES), draw(st.booleans())
    kind = draw(st.sampled_from(["linear", "conv1d", "conv2d"]))
    if kind == "linear":
        features = draw(st.integers(1, 40))
        middle = draw(st.sampled_from([(), (3,), (2, 2)]))
        return nn.Linear(features, draw(st.integers(1, 20)), bias=has_bias), (
            *(batch, *middle, features),
        )
    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 5)), groups * draw(st.integers(1, 4))
    geometry: dict[str, Any] = {name: draw(st.integers(1, 2)) for name in ("stride", "dilation")}
    kernel, padding = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    make = nn.Conv1d if kind == "conv1d" else nn.Conv2d
    layer = make(*(*channels, kernel), padding=padding, groups=groups, bias=has_bias, **geometry)
    return layer, (batch, channels[0], *[9] * (1 if kind == "conv1d" else 2))


@pytest.mark.dynamic_convolution
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(layer=_layers(), options=_options(), seed=st.integers(0, 999), in_place=st.booleans())
def test_random_forms_pass_the_judge(
    layer: Any, options: dict[str, Any], seed: int, build: Any, *, in_place: bool
) -> None:
    torch.manual_seed(seed)
    module = build.quantized(layer[0], **options)
    x = torch.randn(layer[1])
    inputs: tuple[Tensor, ...] = (x,)
    if options["residual"]:
        inputs = (x, torch.randn_like(module(x), dtype=torch.float32))
    exported = build.export(module, *inputs)
    expected = exported(*inputs)

    record = build.lower(exported, allow_in_place=in_place)

    assert len(record.lowered) == 1
    result = exported(*inputs)
    if expected.dtype == torch.uint8:  # too few elements for a share: no more than one may flip
        steps = (result.int() - expected.int()).abs()
        assert int(steps.max()) <= 1
        assert int(steps.count_nonzero()) <= 1 + steps.numel() // 1000
    elif expected.count_nonzero():
        build.assert_exact(result, expected)


def _compile(module: nn.Module, rules: Any, *inputs: Tensor) -> tuple[Any, Any, str]:
    """Compile, call twice, and return both results and the generated code."""
    passes = QuantLiftUp(), Int8Lowering(rules), DecomposeQuantization()
    settings = {"freezing": True, "fx_graph_cache": False}
    with torch.no_grad(), torch._inductor.config.patch(settings), pre_grad_passes(*passes):
        first, code = run_and_get_code(torch.compile(module), *inputs)
        first = torch.utils._pytree.tree_map(torch.clone, first)
        return first, torch.compile(module)(*inputs), "\n".join(code)


def _kernels(code: str) -> list[str]:
    return sorted(re.findall(r"torch\.ops\.onednn\.(\w+)\.\w+\(", code))


class Residuals(nn.Module):
    """Case 27: what an in-place addition could destroy, several at once."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        self.linear = build.quantized(nn.Linear(16, 12), residual="input")
        self.relu = build.quantized(nn.Linear(16, 12), residual="input", post_op=F.relu)
        self.conv = build.quantized(nn.Conv2d(8, 12, 3, padding=1), residual="input")

    def forward(self, h: Tensor, x: Tensor, many: Tensor, image: Tensor, other: Tensor) -> Any:
        return (
            self.linear(h, x),
            self.relu(h, many[0]),
            self.conv(image, other),
        )


def test_compiled_models_leave_their_inputs_alone(build: Any) -> None:
    inputs = (
        *(torch.randn(5, 16), torch.randn(5, 12), torch.randn(2, 5, 12)),
        torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last),
        torch.randn(2, 12, 6, 6).to(memory_format=torch.channels_last),
    )
    before = [value.clone() for value in inputs]
    module = build.export(Residuals(build), *inputs)
    expected = module(*inputs)

    first, second, code = _compile(module, build.rules, *inputs)

    assert all(torch.equal(old, new) for old, new in zip(before, inputs, strict=True))
    for once, twice, wanted in zip(first, second, expected, strict=True):
        assert torch.equal(once, twice)
        build.assert_exact(once, wanted)
    assert _kernels(code) == ["qconv_pointwise", "qlinear_pointwise", "qlinear_pointwise"]
    assert "'sum'" not in code


class Block(nn.Module):
    """Two residuals that may be added in place, a dynamic layer, and two clamped outputs."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        self.params = build.tight
        self.first = build.quantized(nn.Linear(16, 12), output=build.tight)
        self.gelu = build.quantized(nn.Linear(16, 12), output=build.tight, post_op=F.gelu)
        self.second = build.quantized(nn.Linear(16, 12), residual="computed", post_op=F.relu)
        self.conv = build.quantized(nn.Conv2d(8, 12, 3), residual="computed")
        self.dynamic = build.quantized(nn.Linear(16, 12), is_dynamic=True)

    def forward(self, x: Tensor, y: Tensor, image: Tensor, other: Tensor) -> Any:
        return (
            qd.dequantize_per_tensor(self.first(x), *self.params),
            qd.dequantize_per_tensor(self.gelu(x), *self.params),
            self.second(x, y),
            self.conv(image, other),
            self.dynamic(x.abs() + 1),
        )


@pytest.mark.sizes_before_autograd
def test_compiled_models_add_in_place_where_it_is_safe(build: Any) -> None:
    inputs = (
        *(4 * torch.randn(5, 16), torch.randn(5, 12)),
        torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last),
        torch.randn(2, 12, 4, 4).to(memory_format=torch.channels_last),
    )
    module = build.export(Block(build), *inputs)
    expected = module(*inputs)

    first, second, code = _compile(module, build.rules, *inputs)

    for once, twice, wanted in zip(first, second, expected, strict=True):
        assert torch.equal(once, twice)
        assert twice.shape == wanted.shape
    for result, wanted in zip(first[:2], expected[:2], strict=True):
        assert torch.equal(result.max(), wanted.max())
        assert int(((result - wanted) / build.tight[0]).round().abs().max()) <= 1
    for result, wanted in zip(first[2:], expected[2:], strict=True):
        build.assert_exact(result, wanted)
    assert _kernels(code) == ["qconv2d_pointwise", *["qlinear_pointwise"] * 4]
    assert code.count("'sum'") == 2
    assert code.count("torch.uint8, 'hardtanh', [-0.6, 0.67]") == 1
    assert "torch.ops.versatil" not in code


@pytest.mark.parametrize("pack", [onednn_kernels.pack, lambda _, w, __: gemm_kernels.pack(w)])
def test_a_weight_is_packed_by_its_values_whatever_its_strides(pack: Any) -> None:
    # oneDNN's packing reads memory row by row: a transposed weight came out as other numbers.
    qx = torch.randint(100, 150, (3, 6), dtype=torch.uint8)
    weight = torch.randint(-50, 50, (6, 8)).to(torch.int8).t()
    w_scale = torch.rand(8)
    call = Int8Call(qx, 0.1, 120, weight, w_scale, None)
    assert not weight.is_contiguous()

    packed = pack(call, weight, w_scale)

    expected = pack(call, weight.contiguous(), w_scale)
    assert torch.equal(packed.to_dense(), expected.to_dense())
