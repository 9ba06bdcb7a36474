"""Pad a quantized activation with what stands for 0."""

from collections.abc import Sequence
from typing import Any

import torch

from versatil_passes.kernel_graph import Emit

aten, prims = torch.ops.aten, torch.ops.prims


def pad_quantized(
    x: Any, widths: Sequence[Any], zero_point: Any, dtype: torch.dtype, emit: Emit
) -> Any:
    """Emit the ops that pad ``x`` with its zero point, which is the number 0.

    Args:
        x: The quantized activation.
        widths: As ``aten.constant_pad_nd`` takes them: before and after, from the last dimension on. A negative
            width cuts off.
        zero_point: A number, or the tensor of a dynamic activation.
        dtype: Of ``x``.
        emit: Receives each operator with its arguments, and returns its result.

    Returns:
        The last result that ``emit`` returned.
    """
    if isinstance(zero_point, int):
        return emit(aten.constant_pad_nd.default, x, widths, zero_point)
    # A measured zero_point is a tensor, and a pad takes a number: 0 is right for the distance from it.
    zero_point = emit(prims.convert_element_type.default, zero_point, torch.int16)
    wide = emit(prims.convert_element_type.default, x, torch.int16)
    distance = emit(aten.sub.Tensor, wide, zero_point)
    distance = emit(aten.constant_pad_nd.default, distance, widths, 0)
    padded = emit(aten.add.Tensor, distance, zero_point)
    return emit(prims.convert_element_type.default, padded, dtype)
