"""Bind the neutral int8 operators to one kind of kernel: the product of two int8 matrices."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch.fx import Graph, Node

from versatil_passes.explicit_padding import pad_quantized
from versatil_passes.graph_queries import constant_of, erase_unread, value_of
from versatil_passes.int8_ops import Int8Call, is_int8_op
from versatil_passes.kernel_graph import Emit, GraphConstants, call_now, graph_emit

aten, prims, onednn = torch.ops.aten, torch.ops.prims, torch.ops.onednn

_SHIFT = 128  # from uint8 to int8
_TO_THE_END = 2**63 - 1


class GemmKernels:
    """Replace each ``versatil::qlinear`` and ``versatil::qconv`` by a product of int8 matrices.

    ::

        before:  qx, weight -> versatil.qlinear(x_scale, w_scale, bias)
        after:   qx -> onednn.qlinear_pointwise(packed weight, scale 1) -> mul(x_scale * w_scale) -> add(bias)

    For hardware whose fast int8 kernel takes int8 activations and one scale for the whole weight. Where a weight has
    a scale for each output channel, the product is computed with scale 1, so that it is the sum of integers; the
    scales, the bias and relu follow element by element, which Inductor fuses with whatever comes next. Where it has
    one scale, the kernel applies all of them. uint8 activations are shifted to int8: ``q -
    128`` with ``zero_point - 128`` is the same number, and Inductor fuses the shift into the quantize.

    A convolution becomes a product over its columns: for each output position the int8 values that its kernel
    covers, side by side. Padding is the zero point, which stands for 0. A 1x1 convolution needs no copy.

    Requires: constant weights; convolutions without groups, whose sizes are fixed if the kernel is larger than 1;
    neither residual nor post op nor int8 output, which the rules for this pass must not allow. Other neutral operators
    may be in the graph, from the lowering of another backend.
    Guarantees: nothing is written to; operators of other forms stay as they are.
    """

    def __call__(self, graph: Graph) -> int:
        """Rewrite ``graph`` in place.

        Args:
            graph: A graph that holds neutral int8 operators.

        Returns:
            The number of operators that were bound to a kernel.
        """
        constants = GraphConstants(graph)
        nodes = [node for node in graph.nodes if is_int8_op(node)]
        return sum(_bind_node(node, constants) for node in nodes)

    def uuid(self) -> str:
        """Identity for compile caches: this pass has no options."""
        return "versatil_passes.GemmKernels/1"


def columns_bytes(call: Int8Call, output_shape: Sequence[int]) -> int:
    """Memory that the columns of one image take, in bytes; 0 for a 1x1 convolution, which needs no copy.

    Args:
        call: A convolution without groups.
        output_shape: ``[batch, out_channels, *spatial]``.
    """
    if call.is_one_by_one:
        return 0
    return math.prod((*_value(call.weight).shape[1:], *output_shape[2:]))


def run(call: Int8Call) -> torch.Tensor:
    """Compute a neutral operator on tensors, packing its weight for this one call."""
    ones, zeros = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    result: torch.Tensor = bind(call, pack(call.weight), ones, zeros, call_now)
    return result


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The int8 weight as a matrix ``[out_channels, kernel positions * channels]``, in the kernel's own layout."""
    matrix = weight.movedim(1, -1).reshape(weight.shape[0], -1)
    packed: torch.Tensor = onednn.qlinear_prepack(matrix.contiguous(), None)
    return packed


def bind(call: Int8Call, packed: Any, ones: Any, zeros: Any, emit: Emit) -> Any:
    """Emit the kernel and the element-wise ops that compute ``call``.

    Args:
        call: What to compute.
        packed: The packed weight.
        ones: float32, one element: the scale of the weight.
        zeros: int32, one element: its zero_point.
        emit: Receives each operator with its arguments, and returns its result.

    Returns:
        The last result that ``emit`` returned.
    """
    qx, zero_point = _signed(call, emit)
    if call.geometry is not None:
        qx = _columns(call, qx, zero_point, emit)
    has_one_scale = _value(call.w_scale).numel() == 1
    product = _with_one_scale if has_one_scale else _with_channel_scales
    y = product(call, qx, zero_point, packed, ones, zeros, emit)
    if call.geometry is None:
        return y
    if len(call.geometry[0]) == 1:
        y = emit(aten.squeeze.dim, y, 1)
        return emit(aten.permute.default, y, [0, 2, 1])
    return emit(aten.permute.default, y, [0, 3, 1, 2])


def _with_one_scale(
    call: Int8Call, qx: Any, zero_point: Any, packed: Any, _ones: Any, zeros: Any, emit: Emit
) -> Any:
    """The kernel applies the scale of the weight, and then bias and relu as well."""
    scales = (call.x_scale, zero_point, packed, call.w_scale, zeros)
    output: tuple[Any, ...] = (1.0, 0, torch.float32, call.post_op, [], "")
    return emit(_kernel(call), qx, *scales, call.bias, *output)


def _with_channel_scales(
    call: Int8Call, qx: Any, zero_point: Any, packed: Any, ones: Any, zeros: Any, emit: Emit
) -> Any:
    """The kernel adds up integers; what follows needs the scales of the channels first."""
    unit = ones if call.is_dynamic else 1.0
    output: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
    y = emit(_kernel(call), qx, unit, zero_point, packed, ones, zeros, None, *output)
    scale = call.x_scale
    if call.is_dynamic:  # choose_qparams measures in float64
        scale = emit(prims.convert_element_type.default, scale, torch.float32)
    y = emit(aten.mul.Tensor, y, emit(aten.mul.Tensor, call.w_scale, scale))
    if call.bias is not None:
        y = emit(aten.add.Tensor, y, call.bias)
    return emit(aten.relu.default, y) if call.post_op == "relu" else y


def _kernel(call: Int8Call) -> Any:
    packet = onednn.qlinear_pointwise
    return packet.tensor if call.is_dynamic else packet.default


def _bind_node(node: Node, constants: GraphConstants) -> bool:
    call = Int8Call.from_args(node.args)
    weight = constant_of(call.weight)
    if weight is None or not _is_product(call):
        return False
    with node.graph.inserting_before(node):
        packed = constants.get(
            ("weight", str(call.weight.target)), lambda: pack(weight), call.weight
        )
        ones = constants.get(("ones",), lambda: torch.ones(1), call.weight)
        zeros = constants.get(("zeros",), lambda: torch.zeros(1, dtype=torch.int32), call.weight)
        result = bind(call, packed, ones, zeros, graph_emit(node.graph))
    result.meta = {**node.meta, "val": result.meta.get("val", node.meta.get("val"))}
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    erase_unread([call.weight])
    return True


def _is_product(call: Int8Call) -> bool:
    """Whether one product of matrices, a scale, a bias and relu are all that ``call`` is."""
    if call.other is not None or call.has_int8_output or call.post_op not in {"none", "relu"}:
        return False
    sizes = _value(call.qx).shape[2:]
    return call.geometry is None or (
        call.geometry[3] == 1
        and (call.is_one_by_one or all(isinstance(size, int) for size in sizes))
    )


def _signed(call: Int8Call, emit: Emit) -> tuple[Any, Any]:
    """The activation as int8, and its zero_point: ``q - 128`` and ``zero_point - 128`` are the same number."""
    if _value(call.qx).dtype is torch.int8:
        return call.qx, call.x_zero_point
    wide = emit(prims.convert_element_type.default, call.qx, torch.int16)
    qx = emit(prims.convert_element_type.default, emit(aten.sub.Tensor, wide, _SHIFT), torch.int8)
    if call.is_dynamic:
        return qx, emit(aten.sub.Tensor, call.x_zero_point, _SHIFT)
    return qx, call.x_zero_point - _SHIFT


def _columns(call: Int8Call, qx: Any, zero_point: Any, emit: Emit) -> Any:
    """What each output position of a convolution reads: int8 ``[batch, *output, kernel positions * channels]``."""
    assert call.geometry is not None
    stride, padding, dilation = (list(values) for values in call.geometry[:3])
    kernel, sizes = list(_value(call.weight).shape[2:]), list(_value(call.qx).shape[2:])
    if len(kernel) == 1:  # one row
        qx = emit(aten.unsqueeze.default, qx, 2)
        kernel, sizes = [1, *kernel], [1, *sizes]
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    x = emit(aten.permute.default, qx, [0, 2, 3, 1])
    if any(padding):
        rows, columns = padding
        widths = [0, 0, columns, columns, rows, rows]
        x = pad_quantized(x, widths, zero_point, torch.int8, emit)
    if kernel == [1, 1]:
        return _every(x, stride, emit)
    # How far the first column's rows and columns reach; the others are shifted.
    spans = [
        (size + 2 * pad - step * (length - 1) - 1) // every * every + 1
        for size, pad, step, length, every in zip(
            sizes, padding, dilation, kernel, stride, strict=True
        )
    ]
    parts = []
    for position in product(*map(range, kernel)):
        part = x
        for dim, (index, step) in enumerate(zip(position, dilation, strict=True)):
            start = index * step
            part = emit(aten.slice.Tensor, part, dim + 1, start, start + spans[dim], stride[dim])
        parts.append(part)
    return emit(aten.cat.default, parts, 3)


def _every(x: Any, stride: list[int], emit: Emit) -> Any:
    for dim, step in enumerate(stride):
        if step > 1:
            x = emit(aten.slice.Tensor, x, dim + 1, 0, _TO_THE_END, step)
    return x


def _value(value: Any) -> torch.Tensor:
    """The tensor itself, or the constant or fake one behind a node."""
    found = value if isinstance(value, torch.Tensor) else constant_of(value)
    found = value_of(value) if found is None else found
    assert found is not None
    return found
