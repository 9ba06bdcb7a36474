"""Finds out which of the logged kernels ran which layer."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import product

from versatil_core.kernel_log import LoggedKernel, Problem
from versatil_core.layer_report import KernelRun, LayerReport
from versatil_passes.float_layers import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS

_PRODUCTS = {"matmul", "bmm", "mm", "addmm", "baddbmm"}
# Kinds of kernels whose sizes may not be those of the layer, or that are logged without sizes.
_BY_ORDER = (
    (CONVOLUTIONS, {"convolution"}),
    (TRANSPOSED_CONVOLUTIONS, {"deconvolution"}),
    (_PRODUCTS, {"SGEMM_BATCH", "DGEMM_BATCH"}),
)


def kernels_of_layers(
    layers: Sequence[LayerReport], runs: Sequence[Sequence[LoggedKernel]], *, is_float: bool
) -> tuple[KernelRun | None, ...]:
    """Match the kernels of several equal runs to layers.

    In running order, each layer takes the first kernel that computes its problem and is not taken
    yet. Some int8 convolutions are made with more channels or other sizes than the layer has, so
    that oneDNN gets them right, and MKL doesn't log the sizes of batched products: what is left of
    either is matched in order if it is as many kernels as layers.

    Args:
        layers: Of the model, in running order.
        runs: What each run logged.
        is_float: Whether it was the float model that ran, in which no layer is int8.

    Returns:
        For each layer its kernel, with the least of its seconds, since whatever disturbs a run
        adds to them; None where none was found.
    """
    found = [_one_run(layers, run, is_float=is_float) for run in runs]
    return tuple(_fastest([run[index] for run in found]) for index in range(len(layers)))


def problems_of(layer: LayerReport) -> tuple[Problem, ...]:
    """Return what a kernel may be logged to compute if it runs a layer, the likeliest first."""
    source, weight, result = layer.input_shape, layer.weight_shape, layer.output_shape
    if layer.op == "linear" and source and result:
        return (("gemm", (1, math.prod(source[:-1]), source[-1], result[-1])),)
    if layer.op in _PRODUCTS and len(source) > 1 and len(weight) > 1:
        batch, rows, columns = math.prod(result[:-2]), source[-2], weight[-1]
        return (
            ("gemm", (batch, rows, source[-1], columns)),
            ("gemm", (1, batch * rows, source[-1], columns)),
        )
    if layer.op in TRANSPOSED_CONVOLUTIONS and len(result) > 2 and len(source) > 1:
        batch, channels, *sizes = result
        return (("deconv", (batch, source[1], channels, *(size for size in sizes if size != 1))),)
    if layer.op in CONVOLUTIONS and len(result) > 2 and len(weight) > 2:
        batch, channels, *sizes = result
        spatial = [size for size in sizes if size != 1]
        positions, patch = batch * math.prod(sizes), math.prod(weight[1:])
        return (
            ("conv", (batch, source[1], channels, *spatial)),
            ("gemm", (1, positions, patch, channels)),  # on Arm, and 1x1 ones anywhere
        )
    return ()


def _one_run(
    layers: Sequence[LayerReport], run: Sequence[LoggedKernel], *, is_float: bool
) -> list[LoggedKernel | None]:
    waiting: dict[tuple[Problem, bool], list[LoggedKernel]] = defaultdict(list)
    for kernel in run:
        if kernel.problem is not None:
            waiting[kernel.problem, kernel.is_int8].append(kernel)
    found: list[LoggedKernel | None] = [None] * len(layers)
    # First those of the kind that the audit promises, then whatever computes the same.
    for is_other_kind in (False, True):
        for index, layer in enumerate(layers):
            if found[index] is None:
                is_int8 = (layer.is_int8 and not is_float) != is_other_kind
                keys = [(problem, is_int8) for problem in problems_of(layer)]
                queue = next((waiting[key] for key in keys if waiting[key]), None)
                found[index] = None if queue is None else queue.pop(0)
    _match_what_is_left(layers, found, run, is_float=is_float)
    return found


def _match_what_is_left(
    layers: Sequence[LayerReport],
    found: list[LoggedKernel | None],
    run: Sequence[LoggedKernel],
    *,
    is_float: bool,
) -> None:
    taken = {id(kernel) for kernel in found}
    for (ops, primitives), is_int8 in product(_BY_ORDER, (True, False)):
        open_layers = [
            index
            for index, layer in enumerate(layers)
            if found[index] is None
            and layer.op in ops
            and (layer.is_int8 and not is_float) == is_int8
        ]
        left = [
            kernel
            for kernel in run
            if id(kernel) not in taken
            and kernel.primitive in primitives
            and kernel.is_int8 == is_int8
        ]
        if len(open_layers) == len(left):
            for index, kernel in zip(open_layers, left, strict=True):
                found[index] = kernel


def _fastest(kernels: Sequence[LoggedKernel | None]) -> KernelRun | None:
    seen = [kernel for kernel in kernels if kernel is not None]
    if not seen:
        return None
    return KernelRun(
        library=seen[-1].library,
        implementation=seen[-1].implementation,
        primitive=seen[-1].primitive,
        dtypes=seen[-1].dtypes,
        seconds=min(kernel.seconds for kernel in seen),
    )
