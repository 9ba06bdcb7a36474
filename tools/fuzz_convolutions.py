"""Run random int8 convolutions on this CPU's kernels, and compare each one with float64.

Prints the convolutions that are wrong or crash, and ends with 1 if there are any. ``--raw`` calls
oneDNN's kernel without ``versatil_passes.onednn_geometry``, which shows what that is for.
``ONEDNN_MAX_CPU_ISA=AVX2`` and the like try the kernels of lesser CPUs.

Usage::

    python tools/fuzz_convolutions.py SECONDS [--seed N] [--raw]
"""

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from versatil_passes import onednn_kernels
from versatil_passes.int8_ops import Int8Call
from versatil_passes.kernel_graph import call_now
from versatil_passes.onednn_geometry import wrong_for_some_size

SCALE, ZERO_POINT = 0.01, 18
CHANNELS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)


class Convolution(NamedTuple):
    """One case; lists have a number for each axis."""

    size: list[int]
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    channels: int
    outputs: int
    batch: int
    is_dynamic: bool
    has_residual: bool
    has_int8_output: bool


def draw(source: random.Random) -> Convolution:
    """Draw a convolution: most are small, which is where kernels go wrong."""

    def chance(share: float) -> bool:
        return source.random() < share

    axis_count = source.choice([1, 2, 2, 2, 3])
    is_small = axis_count == 3 or chance(0.7)
    sizes = (1, 2, 3, 4, 5, 7, 8, 9, 17) if is_small else (7, 14, 20, 28, 33)
    axes: list[tuple[int, ...]] = []
    while len(axes) < axis_count:
        size, length = source.choice(sizes), source.choice((1, 1, 2, 3, 3, 4, 5, 7))
        every, step = source.choice((1, 1, 2, 3, 4)), source.choice((1, 1, 1, 2, 3, 4))
        reach = step * (length - 1)
        width = source.choice((0, 1, 2, 3, reach // 2, reach))
        if size + 2 * width > reach:
            axes.append((size, length, every, width, step))
    image, kernel, stride, padding, dilation = map(list, zip(*axes, strict=True))
    groups = source.choice((1, 1, 2, 4, *CHANNELS))
    return Convolution(
        image,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        channels=groups * source.choice((1, 1, *CHANNELS[:8])),
        outputs=groups * source.choice((1, 2, *CHANNELS[:8])),
        batch=source.choice((1, 2)),
        is_dynamic=chance(0.25),
        has_residual=axis_count == 2 and chance(0.25),
        has_int8_output=chance(0.5),
    )


def share_wrong(case: Convolution, *, is_raw: bool) -> float:
    """Compute the case on the int8 kernel and in float64; the share of the results that are wrong, from 0 to 1."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    call = _call(case)
    if not is_raw and wrong_for_some_size(call) is not None:
        return 0.0  # it stays float
    expected = _expected(call)
    if case.has_int8_output:
        scale = float(expected.abs().max()) / 100 + 1e-3
        call = replace(
            call,
            output_scale=scale,
            output_zero_point=100,
            output_quant_max=255,
            output_dtype=torch.uint8,
        )
        expected = (expected / scale).round().add(100).clamp(0, 255)
    result = _raw(call) if is_raw else onednn_kernels.run(call)
    tolerance = 1.0 if case.has_int8_output else 1e-4 * float(expected.abs().max()) + 1e-6
    return float(((result.double() - expected).abs() > tolerance).double().mean())


def _call(case: Convolution) -> Int8Call:
    """The neutral operator, with values that no kernel can saturate on."""
    qx = torch.randint(0, 128, (case.batch, case.channels, *case.size), dtype=torch.uint8)
    weight = torch.randint(-60, 61, (case.outputs, case.channels // case.groups, *case.kernel))
    x_scale: Any = torch.tensor(SCALE) if case.is_dynamic else SCALE
    x_zero_point: Any = torch.tensor(ZERO_POINT) if case.is_dynamic else ZERO_POINT
    call = Int8Call(
        *(qx, x_scale, x_zero_point, weight.to(torch.int8)),
        w_scale=torch.linspace(0.005, 0.01, case.outputs),
        bias=torch.linspace(-1, 1, case.outputs),
        geometry=(case.stride, case.padding, case.dilation, case.groups),
    )
    if case.has_residual:
        other = torch.randn(_expected(call).shape).to(memory_format=torch.channels_last)
        call = replace(call, other=other)
    return call


def _expected(call: Int8Call) -> Tensor:
    """The definition, in float64."""
    assert call.geometry is not None
    x = (call.qx.double() - ZERO_POINT) * SCALE
    weight = call.weight.double() * call.w_scale.double().view(-1, 1, *[1] * (x.dim() - 2))
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[len(call.geometry[0]) - 1]
    y = convolve(x, weight, call.bias.double(), *call.geometry)
    return y if call.other is None else y + call.other.double()


def _raw(call: Int8Call) -> Tensor:
    packed = onednn_kernels.pack(call, call.weight, call.w_scale)
    zeros = torch.zeros_like(call.w_scale, dtype=torch.int32)
    result: Tensor = onednn_kernels.bind(call, packed, zeros, call_now, is_in_place=False)
    return result


def wrong_cases(seconds: float, seed: int, *, is_raw: bool) -> Iterator[tuple[Convolution, str]]:
    """Yield the cases that are wrong or crash, and how; each time, a new process goes on."""
    source = random.Random(seed)  # noqa: S311 - no secret
    end, tried = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            while time.monotonic() < end:
                case, tried = draw(source), tried + 1
                try:
                    share = pool.submit(share_wrong, case, is_raw=is_raw).result()
                except BrokenProcessPool:
                    yield case, "crashed"
                    break
                if share > 0:
                    yield case, f"{share:.0%} wrong"
                    break  # who knows what else it wrote to
    print(f"{tried} convolutions, torch {torch.__version__}")


def main() -> int:
    """Run, and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--raw", action="store_true", help="the kernel alone")
    given = parser.parse_args()
    wrong = 0
    for case, how in wrong_cases(given.seconds, given.seed, is_raw=given.raw):
        wrong += 1
        print(f"{how}: {case}")
    print(f"{wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
