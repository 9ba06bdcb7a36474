"""Convolutions on which oneDNN's int8 kernels are wrong or crash: ours are right, on every CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from versatil_passes import Int8Lowering, OneDNNKernels
from versatil_passes.int8_ops import Int8Call
from versatil_passes.kernel_graph import call_now
from versatil_passes.onednn_geometry import right_form

Layer = tuple[tuple[int, ...], dict[str, Any]]


def _layer(size: tuple[int, ...], channels: tuple[int, int], kernel: Any, **geometry: Any) -> Layer:
    shape, (inputs, outputs) = (2, channels[0], *size), channels
    return shape, {
        "in_channels": inputs,
        "out_channels": outputs,
        "kernel_size": kernel,
        **geometry,
    }


CRASH = {
    "pointwise": _layer((5, 1), (1, 1), 1, padding=2, stride=(1, 3), dilation=(1, 4)),
    "a row, groups": _layer((2,), (40, 16), 1, padding=1, stride=3, dilation=3, groups=8),
}
PADDING_ALONE = {
    "beyond the kernel": _layer((14, 33), (16, 256), 3, padding=(3, 2), stride=(1, 3), groups=16),
    "a volume": _layer(
        (4, 8, 2),
        (4, 2),
        (3, 3, 2),
        stride=(3, 3, 4),
        padding=(0, 3, 1),
        dilation=(1, 1, 3),
        groups=2,
    ),
    "a gap over the data": _layer((1, 2), (24, 32), (7, 2), padding=(3, 1), dilation=(1, 3)),
}
ONE_COLUMN = {
    "one column, groups": _layer((17, 3), (4, 32), 3, padding=1, stride=(1, 3), groups=4),
    "one column": _layer((8, 4), (1, 8), (1, 3), stride=(1, 2)),
}
WRONG = PADDING_ALONE | ONE_COLUMN
# On some CPUs or versions of torch.
WRONG_SOMEWHERE = {
    "depthwise": _layer((33, 33), (32, 32), 1, padding=(3, 0), groups=32),
    "one column, one channel": _layer((17, 2), (1, 1), 3, padding=2, stride=(1, 4)),
}
ALL = CRASH | WRONG | WRONG_SOMEWHERE
ONE_PLANE = {
    "one plane": _layer((1, 5, 17), (17, 68), 3, padding=(1, 2, 2), stride=(1, 4, 2), groups=17),
    "one plane, one channel": _layer((1, 4, 9), (1, 1), (7, 3, 3), padding=(3, 2, 0)),
}
ORDINARY = {
    "resnet, first": _layer((32, 32), (3, 8), 7, padding=3, stride=2),
    "resnet": _layer((8, 8), (8, 8), 3, padding=1, stride=2),
    "resnet, downsample": _layer((8, 8), (8, 16), 1, stride=2),
    "mobilenet": _layer((7, 7), (16, 16), 3, padding=1, groups=16),
    "efficientnet": _layer((7, 7), (16, 16), 5, padding=2, stride=2, groups=16),
    "convnext": _layer((7, 7), (8, 8), 7, padding=3, groups=8),
    "convnext, first": _layer((32, 32), (3, 8), 4, stride=4),
    "yolo, pooled to a point": _layer((1, 1), (8, 8), 3, padding=1),
    "deeplab": _layer((14, 14), (8, 8), 3, padding=18, dilation=18),
    "one channel": _layer((28, 28), (1, 8), 5, padding=2),
    "text": _layer((20, 16), (1, 8), (3, 16)),
    "video": _layer((4, 8, 8), (3, 8), 3, padding=1, stride=(1, 2, 2)),
    "tomography": _layer((8, 8, 8), (1, 4), 3, padding=1),
    "speech": _layer((40,), (8, 8), 3, padding=1, stride=2),
    "wavenet": _layer((40,), (8, 8), 2, padding=4, dilation=4),
}
CONVOLVE = (torch.conv1d, torch.conv2d, torch.conv3d)
DYNAMIC, RESIDUAL = {"is_dynamic": True}, {"residual": "computed"}


def _run(mode: str, layers: dict[str, Any], **environment: str) -> dict[str, int]:
    """How far each layer is from its reference, in dB; after a crash, the rest in another process."""
    found: dict[str, int] = {}
    waiting = dict(layers)
    while waiting:
        process = subprocess.run(
            [sys.executable, _PROGRAM, mode, json.dumps(waiting)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode <= 0, process.stderr  # below 0: by a signal
        for line in process.stdout.splitlines():
            name, _, decibels = line.rpartition(" ")
            found[name] = int(decibels)
        waiting = {name: layer for name, layer in waiting.items() if name not in found}
        if waiting:
            found[next(iter(waiting))] = -1  # it crashed
            del waiting[next(iter(waiting))]
    return found


_PROGRAM = str(Path(__file__).with_name("convolution_program.py"))


def _with_options(layers: dict[str, Layer]) -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {"static": {}}
    if _has_dynamic_kernel():
        options["dynamic"] = DYNAMIC
    return {
        f"{name}, {kind}": (*layer, chosen)
        for name, layer in layers.items()
        for kind, chosen in ({**options, "residual": RESIDUAL}).items()
        if chosen is not RESIDUAL or len(layer[0]) == 4
    }


def _has_dynamic_kernel() -> bool:
    """Whether torch can trace an int8 convolution with a dynamic activation: from 2.10 on."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("onednn::qconv_pointwise.tensor", "Meta")


def test_lowered_ones_are_right() -> None:
    layers = _with_options(ALL)
    found = _run("lowered", layers)
    assert found.keys() == layers.keys()
    assert {name: db for name, db in found.items() if db < 100} == {}


def test_compiled_ones_are_right() -> None:
    names = ("pointwise", "one column, groups")
    found = _run("compiled", _with_options({name: ALL[name] for name in names}))
    assert {name: db for name, db in found.items() if db < 100} == {}
    assert len(found) >= 4


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
    reason="the kernels that are wrong take AVX-512",
)
@pytest.mark.skipif(
    torch.__version__ >= "2.16", reason="known of torch 2.9 to 2.15; see whether it is right now"
)
def test_the_kernels_alone_are_wrong() -> None:
    """Whether one crashes depends on what lies in memory, but of these some are wrong each time.

    If this fails, oneDNN may have mended it, and ``onednn_geometry`` can go one day.
    """
    layers: dict[str, Any] = {name: (*layer, {}) for name, layer in (WRONG | ONE_PLANE).items()}
    found = _run("raw", layers, ONEDNN_MAX_CPU_ISA="AVX512_CORE")
    assert min(found.values()) < 60


def _call(shape: tuple[int, ...], layer: dict[str, Any], *, is_dynamic: bool = False) -> Int8Call:
    make: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
    conv = make(**layer)
    qx = torch.randint(0, 128, shape, dtype=torch.uint8)
    weight = torch.randint(-60, 61, conv.weight.shape, dtype=torch.int8)
    scale: Any = torch.tensor(1.0) if is_dynamic else 1.0
    zero_point: Any = torch.tensor(18) if is_dynamic else 18
    geometry = (list(conv.stride), list(conv.padding), list(conv.dilation), conv.groups)
    return Int8Call(qx, scale, zero_point, weight, torch.ones(1), None, geometry)


def _integers(call: Int8Call) -> Tensor:
    assert call.geometry is not None
    convolve = CONVOLVE[len(call.geometry[0]) - 1]
    return convolve(call.qx.double() - 18, call.weight.double(), None, *call.geometry)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_convolutions_stay_as_they_are(name: str) -> None:
    call = _call(*ORDINARY[name])
    assert right_form(call, call_now) is call


def test_a_linear_stays_as_it_is() -> None:
    qx, weight = torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(3, 4, dtype=torch.int8)
    call = Int8Call(qx, 1.0, 0, weight, torch.ones(1), None)
    assert right_form(call, call_now) is call


@st.composite
def _layers(draw: st.DrawFn) -> Layer:
    groups, channels = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    size, axes = [], []
    for _ in range(draw(st.integers(1, 3))):
        length, step = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        width, span = draw(st.integers(0, 4)), step * (length - 1) + 1
        least = max(1, span - 2 * width)
        size.append(draw(st.integers(least, least + 8)))
        axes.append((length, draw(st.integers(1, 4)), width, step))
    kernel, stride, padding, dilation = zip(*axes, strict=True)
    channels_out = groups * draw(st.integers(1, 3))
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _layer(tuple(size), (groups * channels, channels_out), kernel, **geometry)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(layer=_layers(), is_dynamic=st.booleans())
def test_the_right_form_computes_the_same_and_is_of_neither_kind(
    layer: Layer, *, is_dynamic: bool
) -> None:
    call = _call(*layer, is_dynamic=is_dynamic)

    form = right_form(call, call_now)

    assert form.qx.dtype == torch.uint8
    expected = _integers(call)
    assert torch.equal(_integers(form), expected)
    assert form.geometry is not None
    assert _reads_data_everywhere(form)
    assert not _is_of_the_second_kind(form, expected.shape)


def _is_of_the_second_kind(call: Int8Call, output: torch.Size) -> bool:
    assert call.geometry is not None
    stride = call.geometry[0]
    return (
        len(stride) == 2 and call.weight.shape[1] == 1 == output[3] and stride[0] == 1 < stride[1]
    )


def _reads_data_everywhere(call: Int8Call) -> bool:
    """Whether no output position sees padding alone, counted out."""
    assert call.geometry is not None
    ones = torch.ones(1, 1, *call.qx.shape[2:])
    kernel = torch.ones(1, 1, *call.weight.shape[2:])
    convolve = CONVOLVE[kernel.dim() - 3]
    return bool(convolve(ones, kernel, None, *call.geometry[:3]).all())


def _exported(build: Any, layer: Layer, axes: dict[int, str], least: int, **options: Any) -> Any:
    """The reference, with some axes open from ``least`` on."""
    shape, arguments = layer
    sizes = {axis: torch.export.Dim(name, min=least, max=64) for axis, name in axes.items()}
    module = build.quantized(nn.Conv2d(**arguments), **options)
    return build.export(module, torch.randn(shape), dynamic_shapes={"x": sizes})


@pytest.mark.parametrize("name", ONE_PLANE)
def test_one_plane_of_single_channels_stays_float(build: Any, name: str) -> None:
    shape, arguments = ONE_PLANE[name]
    module = build.export(build.quantized(nn.Conv3d(**arguments)), torch.randn(shape))

    [declined] = build.lower(module).declined

    assert "its depth is 1 or unknown" in declined.reason


@pytest.mark.parametrize(("least", "is_int8"), [(3, True), (None, False)])
def test_an_open_depth(build: Any, least: int | None, *, is_int8: bool) -> None:
    shape, arguments = _layer((5, 6, 6), (2, 8), 3, padding=1, groups=2)
    depth: Any = torch.export.Dim.AUTO if least is None else torch.export.Dim("d", min=least)
    module = build.export(
        build.quantized(nn.Conv3d(**arguments)),
        torch.randn(shape),
        dynamic_shapes={"x": {2: depth}},
    )

    assert bool(build.lower(module).lowered) is is_int8


SPEECH = _layer((9, 20), (1, 8), 3, padding=1, stride=(1, 2))


def test_where_an_open_width_may_give_one_column_it_stays_float(build: Any) -> None:
    # With a minimum of 2, torch's own convolution refuses the export; without one, it assumes that width isn't 1.
    shape, arguments = SPEECH
    sizes = {"x": {3: torch.export.Dim.AUTO}}
    layer = build.quantized(nn.Conv2d(**arguments))
    module = build.export(layer, torch.randn(shape), dynamic_shapes=sizes)
    (op,) = Int8Lowering(build.rules)(module.graph).declined
    assert "its width is dynamic or unknown" in op.reason
    assert "oneDNN's int8 kernel gives wrong results" in op.reason
    assert "export it with a minimum of 3" in op.reason


@pytest.mark.parametrize(("axis", "name"), [(2, "height"), (3, "width")])
def test_where_open_sizes_give_more_it_is_int8(axis: int, name: str, build: Any) -> None:
    module = _exported(build, SPEECH, {axis: name}, 3)
    _check_sizes(build, module, (2, 1, 9, 20), [axis], [3, 4, 64])


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_open_sizes_are_padded_as_well(build: Any, *, is_dynamic: bool) -> None:
    if is_dynamic and not _has_dynamic_kernel():
        pytest.skip("torch 2.9 has no shape function for the kernel")
    layer = _layer((9, 20), (8, 8), (1, 2), padding=(1, 3), dilation=(1, 3))
    module = _exported(build, layer, {2: "height", 3: "width"}, 2, is_dynamic=is_dynamic)
    _check_sizes(build, module, (2, 8, 9, 20), [2, 3], [2, 3, 17])


def _check_sizes(
    build: Any, module: Any, shape: tuple[int, ...], axes: list[int], sizes: list[int]
) -> None:
    inputs = [
        torch.randn([size if axis in axes else fixed for axis, fixed in enumerate(shape)])
        for size in sizes
    ]
    expected = [module(x) for x in inputs]

    assert len(build.lower(module).lowered) == 1

    for x, wanted in zip(inputs, expected, strict=True):
        build.assert_exact(module(x), wanted)


def test_where_nothing_is_known_of_sizes(build: Any) -> None:
    """A graph without fake values: padded to be sure, and no guess where a width decides."""
    gap = _layer((1, 2), (8, 8), (1, 2), padding=(0, 3), dilation=(1, 3))
    for layer, is_lowered in ((gap, True), (SPEECH, False)):
        shape, arguments = layer
        module = build.export(build.quantized(nn.Conv2d(**arguments)), torch.randn(shape))
        for node in module.graph.nodes:
            node.meta.pop("val", None)
        record = Int8Lowering(build.rules)(module.graph)
        assert len(record.lowered) == is_lowered
        OneDNNKernels()(module.graph)
        targets = [node.target for node in module.graph.nodes]
        assert (torch.ops.aten.constant_pad_nd.default in targets) == is_lowered
