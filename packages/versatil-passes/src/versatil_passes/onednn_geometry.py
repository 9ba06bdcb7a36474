"""Where oneDNN's int8 convolutions are wrong, and the same convolution in a form that they compute right.

Found by running random convolutions against float64 (``tools/fuzz_convolutions.py``), on torch 2.9.1, 2.13.0 and
2.15.0 alike, with oneDNN's AVX-512 kernels; the AVX2 kernels passed. The right forms are right on every CPU, so that
nothing depends on it.

1. An output position sees nothing but padding along an axis: wrong values, or a crash.
2. One channel per group, stride 1 in height and more in width, and an output of width 1: wrong values in every row
   but the first. (Depthwise ones, which have kernels of their own, passed; nothing promises them.)
3. Three spatial axes, one channel per group, and a depth of 1: wrong values. These stay float.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from versatil_passes._torch_compat import is_known
from versatil_passes.explicit_padding import pad_quantized
from versatil_passes.graph_queries import constant_of, value_of
from versatil_passes.int8_ops import Int8Call
from versatil_passes.kernel_graph import Emit


def wrong_for_some_size(call: Int8Call) -> str | None:
    """Why ``call`` has to stay float: no form of it is right for every size that the graph admits.

    Args:
        call: What to compute; its weight is a constant.

    Returns:
        The reason, or ``None`` where the result is right for every size that the graph admits.
    """
    if _is_wrong_for_one_plane(call):
        depth = _axes(call)[0].size
        # What torch takes for 2 or more may be 1 in a call.
        if depth is None or not is_known(depth >= (2 if isinstance(depth, int) else 3)):
            return (
                "its depth is 1 or unknown, and oneDNN's int8 kernel gives wrong results for one channel per group "
                "where the depth is 1: fix the depth, export it with a minimum of 3, or use a convolution in two "
                "dimensions"
            )
    if not _is_wrong_for_one_column(call):
        return None
    width = _axes(call)[1]
    if isinstance(width.size, int) or width.has_several_outputs:
        return None
    return (
        "its width is dynamic or unknown, and oneDNN's int8 kernel gives wrong results for this geometry where the "
        f"output has a width of 1: fix the width, or export it with a minimum of {width.several_from}"
    )


def right_form(call: Int8Call, emit: Emit) -> Int8Call:
    """The same convolution in a geometry that the kernels compute right.

    ::

        before:  qx -> qconv(stride (1, 3), padding (1, 1))
        after:   qx -> constant_pad_nd(zero_point) -> qconv(stride (1, 1), padding (0, 0))

    Args:
        call: What to compute; its weight is a constant.
        emit: Receives the operators that pad the activation, where that is needed.

    Returns:
        ``call`` as it is for a linear, and for any ordinary convolution.
    """
    if call.geometry is None:
        return call
    axes = _axes(call)
    is_wrong = _is_wrong_for_one_column(call) and axes[1].has_one_output
    if not is_wrong and all(axis.always_sees_data for axis in axes):
        return call
    widths = [width for axis in reversed(axes) for width in (axis.padding, axis.after)]
    geometry = (
        [1 if axis.has_one_output else axis.stride for axis in axes],
        [0] * len(axes),
        [axis.dilation for axis in axes],
        call.geometry[3],
    )
    # No kernel takes int8 activations.
    qx = pad_quantized(call.qx, widths, call.x_zero_point, torch.uint8, emit)
    return replace(call, qx=qx, geometry=geometry)


def with_second_channel(call: Int8Call, emit: Emit) -> Int8Call:
    """The same convolution for Inductor, which is wrong about one channel and a size that is not fixed.

    Inductor (2.9 to 2.15) takes the result of such a convolution for contiguous, as its float kernel's is. The int8
    kernel writes channels last, and the compiled model ends with an error. A second channel makes both agree; its
    weights are 0 (:func:`with_channels_of`), so it is never seen.

    Args:
        call: What to compute.
        emit: Receives the operator that adds the channel.

    Returns:
        ``call`` as it is in all other cases.
    """
    if call.geometry is None or _weight_shape(call)[1] * call.geometry[3] != 1:
        return call
    value = value_of(call.qx)
    if value is None or all(isinstance(size, int) for size in value.shape):
        return call
    before_and_after = [0, 0] * len(call.geometry[0]) + [0, 1]
    return replace(
        call, qx=emit(torch.ops.aten.constant_pad_nd.default, call.qx, before_and_after, 0)
    )


def has_second_channel(call: Int8Call) -> bool:
    """Whether :func:`with_second_channel` added one."""
    if call.geometry is None:
        return False
    value = call.qx if isinstance(call.qx, torch.Tensor) else value_of(call.qx)
    return value is not None and value.shape[1] == _weight_shape(call)[1] * call.geometry[3] + 1


def with_channels_of(call: Int8Call, weight: torch.Tensor) -> torch.Tensor:
    """The weight of a convolution, with zeros for a channel that :func:`with_second_channel` added."""
    if not has_second_channel(call):
        return weight
    return functional.pad(weight, [0, 0] * len(weight.shape[2:]) + [0, 1])


@dataclass(frozen=True)
class _Axis:
    """A convolution along one axis; the size is an int, a symbol, or ``None`` where nothing is known."""

    size: Any
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def span(self) -> int:
        """What the kernel spans, with the gaps that dilation leaves."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def always_sees_data(self) -> bool:
        """Whether each output position is known to read one element at least that is no padding."""
        if self.padding >= self.span:
            return False
        # One position of the kernel never leaves the data, such as the middle one with "same" padding.
        if self.padding % self.dilation == 0 and 2 * self.padding < self.span:
            return True
        return self.dilation == 1 or (
            self.size is not None and is_known(self.size >= self.dilation)
        )

    @property
    def several_from(self) -> int:
        """The smallest size for which the output's is 2 or more."""
        return self.stride + self.span - 2 * self.padding

    @property
    def has_one_output(self) -> bool:
        """Whether the size is fixed, and the output's is 1."""
        return isinstance(self.size, int) and self.size < self.several_from

    @property
    def has_several_outputs(self) -> bool:
        """Whether the output's size is known to be 2 or more."""
        return self.several_from <= 1 or (
            self.size is not None and is_known(self.size >= self.several_from)
        )

    @property
    def after(self) -> int:
        """How many elements to add behind the data; where the last ones are never read, below 0."""
        if not isinstance(self.size, int):
            return self.padding
        # Behind what the first output position reads.
        rest = self.size + 2 * self.padding - self.span
        return rest // self.stride * self.stride + self.span - self.size - self.padding


def _axes(call: Int8Call) -> list[_Axis]:
    assert call.geometry is not None
    stride, padding, dilation, _ = call.geometry
    kernel = _weight_shape(call)[2:]
    value = call.qx if isinstance(call.qx, torch.Tensor) else value_of(call.qx)
    sizes = [None] * len(kernel) if value is None else value.shape[2:]
    # A kernel of size 1 has no gaps.
    steps = [1 if length == 1 else step for length, step in zip(kernel, dilation, strict=True)]
    return [_Axis(*axis) for axis in zip(sizes, kernel, stride, padding, steps, strict=True)]


def _is_wrong_for_one_column(call: Int8Call) -> bool:
    """Whether it is a convolution of the second kind, if the output's width is 1."""
    if call.geometry is None or len(call.geometry[0]) != 2:
        return False
    rows, columns = call.geometry[0]
    return _weight_shape(call)[1] == 1 and rows == 1 and columns > 1


def _is_wrong_for_one_plane(call: Int8Call) -> bool:
    """Whether it is a convolution of the third kind, if the input's depth is 1."""
    return call.geometry is not None and len(call.geometry[0]) == 3 and _weight_shape(call)[1] == 1


def _weight_shape(call: Int8Call) -> torch.Size:
    weight = call.weight if isinstance(call.weight, torch.Tensor) else constant_of(call.weight)
    assert weight is not None
    return weight.shape
