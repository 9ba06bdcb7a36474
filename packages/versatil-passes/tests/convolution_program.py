"""Run convolutions that a kernel may crash on: a line with the name of each one that ended, and how it differs.

A program of its own, so that a crash is a failed test. ``raw`` leaves out what keeps the kernel right.
"""

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from versatil_passes import (
    DecomposeQuantization,
    Int8Lowering,
    QuantLiftUp,
    int8_lowering,
    onednn_kernels,
    pre_grad_passes,
)
from versatil_passes.int8_ops import Int8Call
from versatil_passes.kernel_graph import Emit
from versatil_passes.onednn_geometry import right_form, wrong_for_some_size

SPEC = importlib.util.spec_from_file_location("builders", Path(__file__).with_name("conftest.py"))
assert SPEC is not None
assert SPEC.loader is not None
BUILDERS: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(BUILDERS)


def say(*words: object) -> None:
    """Print a line at once: the next convolution may end the process."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def distance_db(result: Tensor, expected: Tensor) -> float:
    """How far from the signal the difference is."""
    signal, noise = expected.double().norm(), (result.double() - expected.double()).norm()
    return 20 * math.log10(signal.item() / (noise.item() + 1e-30))


def compiled(module: nn.Module) -> Callable[..., Any]:
    """Compile with the passes."""

    def run(*inputs: Tensor) -> Any:
        settings = {"freezing": True, "fx_graph_cache": False}
        passes = QuantLiftUp(), Int8Lowering(BUILDERS.RULES), DecomposeQuantization()
        with torch._inductor.config.patch(settings), pre_grad_passes(*passes):
            return torch.compile(module, dynamic=False)(*inputs)

    return run


def main(mode: str, cases: dict[str, Any]) -> None:
    """Run them.

    Args:
        mode: ``"raw"``, ``"lowered"`` or ``"compiled"``.
        cases: For each name the shape of the input, the arguments of ``nn.Conv1d``, ``Conv2d`` or ``Conv3d``, and the options
            of ``Quantized``.
    """
    for name, (shape, layer, options) in cases.items():
        torch.manual_seed(0)
        make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
        module = BUILDERS.Quantized(make(**layer), **options)
        inputs: tuple[Tensor, ...] = (torch.randn(shape),)
        if "residual" in options:
            inputs += (torch.randn_like(module(*inputs)),)
        exported = BUILDERS.export(module, *inputs)
        expected = exported(*inputs)
        if mode == "compiled":
            result = compiled(exported)(*inputs)
        else:
            assert len(BUILDERS.lower(exported, allow_in_place=True).lowered) == 1
            result = exported(*inputs)
        say(name, round(distance_db(result, expected)))


def as_it_is(call: Int8Call, _: Emit) -> Int8Call:
    """Leave a geometry alone that kernels get wrong."""
    return call


def right_for_every_size(_: Int8Call) -> None:
    """Decline nothing."""


IS_RAW = sys.argv[1] == "raw"
with (
    torch.no_grad(),
    patch.object(onednn_kernels, "right_form", as_it_is if IS_RAW else right_form),
    patch.object(
        int8_lowering,
        "wrong_for_some_size",
        right_for_every_size if IS_RAW else wrong_for_some_size,
    ),
):
    main(sys.argv[1], json.loads(sys.argv[2]))
