"""Random layers: int8 is exact for every shape, stride, padding, dilation and zero point.

On Arm the judged kernel is the real one; elsewhere the same graph runs on that machine's int8 x int8 kernel.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from versatil_arm import ArmInductorBackend
from versatil_core import audit, check_exactness, lower, quantize
from versatil_passes.gemm_kernels import columns_bytes, run
from versatil_passes.int8_ops import Int8Call

FEW = settings(
    max_examples=int(os.environ.get("VERSATIL_EXAMPLES", "25")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
# So small that no kernel adds two products of them up to more than 16 bits hold.
LARGEST_WEIGHT = 60
"""int8 weights are within it."""
CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d}


def exact(call: Int8Call) -> Tensor:
    """What the operator defines, in float64."""
    x = (call.qx.double() - float(call.x_zero_point)) * float(call.x_scale)
    scale = call.w_scale.double().view(-1, *[1] * (call.weight.dim() - 1))
    weight, bias = call.weight.double() * scale, call.bias
    bias = None if bias is None else bias.double()
    if call.geometry is None:
        return functional.linear(x, weight, bias)
    convolve = CONVOLUTIONS[call.weight.dim() - 2]
    return convolve(x, weight, bias, *call.geometry)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[list[int], list[int], Any]:
    """Spatial sizes, kernel, and ``(stride, padding, dilation, 1)``, each different for each dimension."""
    dims = draw(st.integers(1, 2))

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(dims)]

    kernel, dilation, padding = each(1, 4), each(1, 3), each(0, 3)
    sizes = [
        max(1, step * (length - 1) + 1 - 2 * pad) + extra
        for step, length, pad, extra in zip(dilation, kernel, padding, each(0, 7), strict=True)
    ]
    return sizes, kernel, (each(1, 4), padding, dilation, 1)


@st.composite
def calls(draw: st.DrawFn) -> Int8Call:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    batch, inputs, outputs = (draw(st.integers(1, high)) for high in (3, 9, 9))
    geometry = None
    if draw(st.booleans()):
        sizes, kernel, geometry = draw(geometries())
        x_shape, w_shape = (batch, inputs, *sizes), (outputs, inputs, *kernel)
    else:
        x_shape = (*[2] * draw(st.integers(0, 2)), batch, inputs)
        w_shape = (outputs, inputs)
    # All of int8 or uint8, but weights that do not let x86 saturate: 2 * 60 * 255 < 2**15.
    is_signed = draw(st.booleans())
    dtype, low = (torch.int8, -128) if is_signed else (torch.uint8, 0)
    x_scale: Any = draw(st.floats(1e-4, 10))
    zero_point: Any = draw(st.integers(low, low + 255))
    if draw(st.booleans()):  # dynamic: measured, as choose_qparams gives them
        x_scale = torch.tensor([x_scale], dtype=torch.float64)
        zero_point = torch.tensor([zero_point])
    return Int8Call(
        integers(low, low + 255, *x_shape).to(dtype),
        x_scale,
        zero_point,
        integers(-LARGEST_WEIGHT, LARGEST_WEIGHT, *w_shape).to(torch.int8),
        torch.rand(draw(st.sampled_from([1, outputs])), generator=generator) + 0.01,
        torch.randn(outputs, generator=generator) if draw(st.booleans()) else None,
        geometry,
    )


@FEW
@given(call=calls())
def test_a_layer_is_the_product_it_stands_for(call: Int8Call) -> None:
    result, wanted = run(call), exact(call)

    assert result.dtype is torch.float32
    assert result.shape == wanted.shape
    # Sums are exact; what follows is float32.
    noise = (result.double() - wanted).abs().max()
    assert noise <= 1e-5 * max(1e-6, float(wanted.abs().max()))
    if call.geometry is not None and max(call.weight.shape[2:]) > 1:
        positions = wanted[0, 0].numel()
        assert columns_bytes(call, wanted.shape) == positions * call.weight[0].numel()


class Layer:
    """A layer, what it takes, and how it is quantized."""

    def __init__(self, layer: nn.Module, x: Tensor, backend: ArmInductorBackend) -> None:
        self.layer, self.x, self.backend = layer, x, backend

    def __repr__(self) -> str:
        return f"{self.backend} of {tuple(self.x.shape)}: {self.layer}"


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    torch.manual_seed(draw(st.integers(0, 99)))
    backend = ArmInductorBackend(
        is_dynamic=draw(st.booleans()),
        is_per_channel=draw(st.booleans()),
        activation_dtype=draw(st.sampled_from(["int8", "uint8"])),
    )
    inputs, outputs, bias = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.booleans())
    layer: nn.Module
    if draw(st.booleans()):
        sizes, kernel, (stride, padding, dilation, _) = draw(geometries())
        make: Any = nn.Conv1d if len(sizes) == 1 else nn.Conv2d
        layer = make(inputs, outputs, kernel, stride, padding, dilation, bias=bias)
        shape = (2, inputs, *sizes)
    else:
        layer, shape = nn.Linear(inputs, outputs, bias=bias), (3, inputs)
    # Far from 0, so that padding with the zero point and padding with 0 are told apart.
    shift = draw(st.sampled_from([-3.0, 0.0, 0.5, 3.0]))
    # Of one input channel x86 may saturate: every second weight is small.
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.view(-1)[1::2] *= 0.05
    return Layer(nn.Sequential(layer, nn.ReLU()).eval(), torch.randn(shape) + shift, backend)


@pytest.mark.portable
@pytest.mark.usefixtures("any_host")
@FEW
@given(case=layers())
def test_quantized_and_lowered_layers_are_exact(case: Layer) -> None:
    calibration = None if case.backend.is_dynamic else [case.x]
    reference = quantize(case.layer, case.x, case.backend, calibration)

    lowered = lower(reference, case.backend)

    assert audit(reference, case.backend).float_layers == ()
    assert not [n for n in lowered.graph.nodes if "aten.conv" in str(n.target)]
    check_exactness(reference, lowered, (case.x,)).raise_if_inexact()
