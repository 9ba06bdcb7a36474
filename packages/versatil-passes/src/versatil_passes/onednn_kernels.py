"""Bind the neutral int8 operators to oneDNN kernels."""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from versatil_passes._torch_compat import size_hint
from versatil_passes.graph_queries import constant_of, erase_unread, value_of
from versatil_passes.int8_ops import Int8Call, is_int8_op
from versatil_passes.kernel_graph import Emit, GraphConstants, call_now, graph_emit
from versatil_passes.onednn_geometry import (
    has_second_channel,
    right_form,
    with_channels_of,
    with_second_channel,
)
from versatil_passes.overwriting import is_overwritable

aten, prims, onednn = torch.ops.aten, torch.ops.prims, torch.ops.onednn

_KERNEL_POST_OPS = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "hardtanh": ("hardtanh", ""),
    "hardswish": ("hardswish", ""),
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}


class OneDNNKernels:
    """Replace each ``versatil::qlinear`` and ``versatil::qconv`` by the oneDNN kernel that computes it.

    ::

        before:  qx, weight -> versatil.qlinear(other=residual, post_op="relu")
        after:   qx, packed weight (a constant) -> onednn.qlinear_pointwise.binary(residual, "sum", "relu")

    A residual addition is done in place (``"sum"``) where ``is_overwritable`` proves
    that nobody can see the overwritten tensor; elsewhere by element-wise ops behind the kernel, which Inductor fuses
    into one loop. (The kernels' other form, ``"add"``, exists for linears only, and Inductor up to 2.13 fails on it
    where the other operand is itself element-wise.)

    Convolutions that the kernel computes wrong are written in a form that it computes right, see
    :mod:`versatil_passes.onednn_geometry`.

    Requires: constant weights; where a weight is an input of the graph the neutral operator stays, and packs the
    weight at each call. With ``allow_in_place``: a functional graph, that is, one after AOTAutograd.
    Guarantees: no graph input, no view of one, and no value that is read later is ever written.

    Args:
        allow_in_place: Whether residual additions may reuse the memory of the other operand.
    """

    def __init__(self, *, allow_in_place: bool = True) -> None:
        """Keep the options."""
        self.allow_in_place = allow_in_place

    def __call__(self, graph: Graph) -> int:
        """Rewrite ``graph`` in place.

        Args:
            graph: A graph that holds neutral int8 operators.

        Returns:
            The number of operators that were bound to a kernel.
        """
        constants = GraphConstants(graph)
        nodes = [node for node in graph.nodes if is_int8_op(node)]
        return sum(self._bind(node, constants) for node in nodes)

    def uuid(self) -> str:
        """Identity for compile caches."""
        return f"versatil_passes.OneDNNKernels/5/{self.allow_in_place}"

    def _bind(self, node: Node, constants: GraphConstants) -> bool:
        call = Int8Call.from_args(node.args)
        if constant_of(call.weight) is None or constant_of(call.w_scale) is None:
            return False
        emit = graph_emit(node.graph)
        with node.graph.inserting_before(node):
            call = with_second_channel(right_form(call, emit), emit)
            kernel = bind(
                call,
                _packed_weight(constants, call),
                _weight_zero_points(constants, call),
                emit,
                is_in_place=self.allow_in_place and is_overwritable(call.other, node),
            )
        kernel.meta = {**node.meta, "val": kernel.meta.get("val", node.meta.get("val"))}
        node.replace_all_uses_with(kernel)
        node.graph.erase_node(node)
        erase_unread([call.weight])
        return True


def run(call: Int8Call) -> torch.Tensor:
    """Compute a neutral operator on tensors, packing its weight for this one call."""
    call = right_form(call, call_now)
    zero_points = torch.zeros_like(call.w_scale, dtype=torch.int32)
    result: torch.Tensor = bind(
        call, pack(call, call.weight, call.w_scale), zero_points, call_now, is_in_place=False
    )
    return result


def pack(call: Int8Call, weight: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """The int8 weight in oneDNN's own layout (an opaque mkldnn tensor)."""
    if call.geometry is None:
        packed: torch.Tensor = onednn.qlinear_prepack(weight.contiguous(), None)
    else:
        zero_point, shape = _layout_of(call)
        weight = with_channels_of(call, weight)
        packed = onednn.qconv_prepack(weight, w_scale, 1.0, zero_point, *call.geometry, shape)
    return packed


def _layout_of(call: Int8Call) -> tuple[int, list[int] | None]:
    """What a convolution's weight is packed for: a zero point, and the shape of the activation.

    oneDNN lays a weight out for the sizes of the activation, and differently where its zero point is not 0; a kernel
    that gets another layout makes its own at every call, which can take longer than the convolution. Scales don't
    matter. What torch (2.9 to 2.15) asks oneDNN is remembered by sizes, whatever the zero point is: the batch size,
    which doesn't matter either, keeps the two kinds apart. A measured zero point is taken for one that is not 0:
    the layout for that is the one that takes long to make.
    """
    zero_point = 0 if call.x_zero_point == 0 and not call.is_dynamic else 1
    value = call.qx if isinstance(call.qx, torch.Tensor) else value_of(call.qx)
    sizes = [None] if value is None else [size_hint(size) for size in value.shape[1:]]
    known = [size for size in sizes if size is not None]
    return zero_point, [1 + zero_point, *known] if len(known) == len(sizes) else None


def bind(
    call: Int8Call, packed: Any, weight_zero_points: Any, emit: Emit, *, is_in_place: bool
) -> Any:
    """Emit the kernel that computes ``call``.

    Args:
        call: What to compute.
        packed: The packed weight.
        weight_zero_points: int32 zeros, one for each element of ``call.w_scale``.
        emit: Receives each operator with its arguments, and returns its result.
        is_in_place: Whether a residual addition may write its result into ``call.other``.

    Returns:
        The last result that ``emit`` returned.
    """
    head = (call.qx, call.x_scale, call.x_zero_point, packed, call.w_scale, weight_zero_points)
    if call.other is not None and not is_in_place:
        return _kernel_then_add(call, emit, head)
    if call.post_op == "relu" and _spatial_dimensions(call) == 3:
        # This kernel applies no function. Quantizing keeps the order of values, and 0 becomes the zero point.
        plain = replace(call, post_op="none")
        y = bind(plain, packed, weight_zero_points, emit, is_in_place=is_in_place)
        if not call.has_int8_output:
            return emit(aten.relu.default, y)
        is_clamped = call.output_zero_point == call.output_quant_min
        return y if is_clamped else emit(aten.clamp_min.default, y, call.output_zero_point)
    y = _kernel(call, emit, head) if call.other is None else _kernel_in_place(call, emit, head)
    if call.is_output_narrow and not _folds_clamp(call):
        y = _clamp(call, y, emit)
    return y


def _kernel_in_place(call: Int8Call, emit: Emit, head: tuple[Any, ...]) -> Any:
    output = (call.output_scale, call.output_zero_point, call.output_dtype)
    residual = (call.other_scale, call.other_zero_point, "sum", 1.0)
    packet = onednn.qlinear_pointwise if call.geometry is None else onednn.qconv2d_pointwise
    # The convolution writes "no function" as None, the linear as "none".
    post_op = None if call.geometry is not None and call.post_op == "none" else call.post_op
    kernel = packet.binary_tensor if call.is_dynamic else packet.binary
    return emit(
        kernel,
        *head,
        call.other,
        call.bias,
        *(call.geometry or ()),
        *output,
        *residual,
        post_op,
        [],
        "",
    )


def _kernel(call: Int8Call, emit: Emit, head: tuple[Any, ...]) -> Any:
    packet = onednn.qlinear_pointwise if call.geometry is None else onednn.qconv_pointwise
    kernel = packet.tensor if call.is_dynamic else packet.default
    output = (call.output_scale, call.output_zero_point, call.output_dtype)
    return emit(kernel, *head, call.bias, *(call.geometry or ()), *output, *_post_op(call))


def _folds_clamp(call: Int8Call) -> bool:
    """Whether the clamp of a narrow output can be a post op: conv1d, conv3d and every addition know none."""
    has_post_ops = _spatial_dimensions(call) in {0, 2}
    return call.other is None and has_post_ops and call.post_op in {"none", "relu", "hardtanh"}


def _spatial_dimensions(call: Int8Call) -> int:
    """Those of a convolution; 0 for a linear."""
    return 0 if call.geometry is None else len(call.geometry[0])


def _post_op(call: Int8Call) -> tuple[str, list[Any], str]:
    """The kernel's post op, with the clamp of a narrow output folded in where possible.

    The kernel itself clamps an int8 output to its dtype's range; a reference with ``reduce_range`` clamps to less.
    Here the bounds are applied in float first: ``(quant_min - zero_point) * scale`` and the same for ``quant_max``.
    Where that can't be, the int8 result is clamped afterwards, which comes to the same: both follow the rounding.
    """
    name, args = call.post_op, list(call.post_op_args)
    if call.is_output_narrow and _folds_clamp(call):
        low = (call.output_quant_min - call.output_zero_point) * call.output_scale
        high = (call.output_quant_max - call.output_zero_point) * call.output_scale
        bounds = {"none": (low, high), "relu": (0.0, high), "hardtanh": tuple(args)}[name]
        name, args = "hardtanh", [min(max(bounds[0], low), high), max(min(bounds[1], high), low)]
    kernel_name, algorithm = _KERNEL_POST_OPS[name]
    return kernel_name, args, algorithm


def _kernel_then_add(call: Int8Call, emit: Emit, head: tuple[Any, ...]) -> Any:
    """A kernel with float output, then the addition and what follows it, element by element."""
    product = replace(
        call, post_op="none", output_scale=1.0, output_zero_point=0, output_dtype=torch.float32
    )
    y = _kernel(product, emit, head)
    other = call.other
    if (call.other_scale, call.other_zero_point) != (1.0, 0):
        other = emit(prims.convert_element_type.default, other, torch.float32)
        other = emit(
            aten.mul.Tensor, emit(aten.sub.Tensor, other, call.other_zero_point), call.other_scale
        )
    y = emit(aten.add.Tensor, y, other)
    if call.post_op == "relu":
        y = emit(aten.relu.default, y)
    if call.has_int8_output:
        return quantize(call, y, emit)
    if call.output_dtype is not torch.float32:
        y = emit(prims.convert_element_type.default, y, call.output_dtype)
    return y


def quantize(call: Int8Call, y: Any, emit: Emit) -> Any:
    """Quantize as ``quantized_decomposed.quantize_per_tensor`` does: multiply by ``1 / scale``, round half to even."""
    y = emit(aten.round.default, emit(aten.mul.Tensor, y, 1.0 / call.output_scale))
    y = emit(aten.add.Tensor, y, call.output_zero_point)
    y = _clamp(call, y, emit)
    return emit(prims.convert_element_type.default, y, call.output_dtype)


def _clamp(call: Int8Call, y: Any, emit: Emit) -> Any:
    """Clamp to the output's quant range; in two ops, since Inductor has taken ``clamp`` apart by now."""
    y = emit(aten.clamp_min.default, y, call.output_quant_min)
    return emit(aten.clamp_max.default, y, call.output_quant_max)


def _packed_weight(constants: GraphConstants, call: Int8Call) -> Node:
    """A ``get_attr`` of the packed weight."""
    weight, w_scale = constant_of(call.weight), constant_of(call.w_scale)
    assert weight is not None
    assert w_scale is not None
    layout = () if call.geometry is None else (repr(_layout_of(call)),)
    scales = (str(call.w_scale.target), repr(call.w_scale.args))
    geometry = repr(call.geometry), has_second_channel(call)
    key = ("weight", str(call.weight.target), scales, geometry, *layout)
    return constants.get(key, lambda: pack(call, weight, w_scale), call.weight)


def _weight_zero_points(constants: GraphConstants, call: Int8Call) -> Node:
    """A ``get_attr`` of int32 zeros, as many as the weight has scales."""
    w_scale = constant_of(call.w_scale)
    assert w_scale is not None
    count = w_scale.numel()
    return constants.get(
        ("zeros", count), lambda: torch.zeros(count, dtype=torch.int32), call.w_scale
    )
