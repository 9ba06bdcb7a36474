"""The float operators of an exported graph that a quantizer is expected to deal with, and what may follow them."""

from typing import Any

import torch
from torch.fx import Node

from versatil_passes.graph_queries import args_of, arguments_of, constant_of

aten = torch.ops.aten

CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
"""Convolution to the number of its spatial dimensions."""
LINEAR_AND_CONV = frozenset({"linear", *CONVOLUTIONS})

FLOAT_LAYERS: dict[Any, str] = {
    aten.linear.default: "linear",
    aten.conv1d.default: "conv1d",
    aten.conv1d.padding: "conv1d",
    aten.conv2d.default: "conv2d",
    aten.conv2d.padding: "conv2d",
    aten.conv3d.default: "conv3d",
    aten.conv3d.padding: "conv3d",
    aten.convolution.default: "convolution",
    aten.conv_transpose1d.default: "conv_transpose1d",
    aten.conv_transpose2d.input: "conv_transpose2d",
    aten.conv_transpose3d.input: "conv_transpose3d",
    aten.addmm.default: "addmm",
    aten.mm.default: "mm",
    aten.matmul.default: "matmul",
    aten.bmm.default: "bmm",
    aten.baddbmm.default: "baddbmm",
    aten.addbmm.default: "addbmm",
    aten.mv.default: "mv",
    aten.addmv.default: "addmv",
    aten.dot.default: "dot",
    aten.vdot.default: "vdot",
    aten.inner.default: "inner",
    aten.outer.default: "outer",
    aten.tensordot.default: "tensordot",
    aten.chain_matmul.default: "chain_matmul",
    aten.linalg_multi_dot.default: "multi_dot",
    aten.cdist.default: "cdist",
    aten.conv_tbc.default: "conv_tbc",
    aten.einsum.default: "einsum",
    aten.bilinear.default: "bilinear",
    aten.embedding.default: "embedding",
    aten.embedding_bag.default: "embedding_bag",
    aten.embedding_bag.padding_idx: "embedding_bag",
    aten.lstm.input: "lstm",
    aten.gru.input: "gru",
    aten.rnn_tanh.input: "rnn_tanh",
    aten.rnn_relu.input: "rnn_relu",
    aten.lstm_cell.default: "lstm_cell",
    aten.gru_cell.default: "gru_cell",
    aten.scaled_dot_product_attention.default: "scaled_dot_product_attention",
    aten._native_multi_head_attention.default: "multi_head_attention",  # noqa: SLF001 - its public name
    aten._transformer_encoder_layer_fwd.default: "transformer_encoder_layer",  # noqa: SLF001 - likewise
}
"""Operator to the name under which a report lists it: everything that multiplies by weights, or matrices together."""

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")
TRANSPOSED_CONVOLUTIONS = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
ADVICE: dict[str, str] = {
    **dict.fromkeys(
        TRANSPOSED_CONVOLUTIONS, "torch has none; nn.Upsample followed by a convolution goes int8"
    ),
    **dict.fromkeys(
        _RECURRENT,
        "it is one operator to torch; its products go int8 if they are written as nn.Linear",
    ),
}
"""What to do about layers that no backend has an int8 kernel for, where there is something."""

_SIMPLE_POST_OPS = {
    aten.relu.default: "relu",
    aten.relu_.default: "relu",
    aten.hardswish.default: "hardswish",
    aten.hardswish_.default: "hardswish",
    aten.silu.default: "silu",
    aten.silu_.default: "silu",
}
_RELU6 = {aten.relu6.default, aten.relu6_.default}
_BOUNDED = {
    aten.hardtanh.default,
    aten.hardtanh_.default,
    aten.clamp.default,
    aten.clamp_.default,
}
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def post_op_of(node: Node) -> tuple[str, tuple[Any, ...]] | None:
    """Name and arguments of the element-wise function that ``node`` is, or ``None`` for any other op.

    Returns:
        ``("relu", ())``, ``("hardtanh", (low, high))``, ``("gelu_tanh", ())`` and the like.
    """
    target: Any = node.target
    if target in _SIMPLE_POST_OPS:
        return _SIMPLE_POST_OPS[target], ()
    if target in _RELU6:
        return "hardtanh", (0.0, 6.0)
    if target is aten.gelu.default:
        return _GELU[str(node.kwargs.get("approximate", "none"))], ()
    if target not in _BOUNDED:
        return None
    _, low, high = arguments_of(node).values()
    is_bounded = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high
    return ("hardtanh", (float(low), float(high))) if is_bounded else None


def conv_geometry(node: Node) -> tuple[list[int], list[int], list[int], int] | str:
    """Stride, padding, dilation and groups of ``aten.conv1d``, ``conv2d`` or ``conv3d``, or why they can't be had.

    Returns:
        Lists with one number for each spatial dimension, and the group count. A text where padding is asymmetric,
        which only ``padding="same"`` with an even ``dilation * (kernel - 1)`` avoids.
    """
    dimensions = CONVOLUTIONS[FLOAT_LAYERS[node.target]]
    given = arguments_of(node)
    stride, padding, dilation = given["stride"], given["padding"], given["dilation"]
    if isinstance(padding, str):
        kernel = _kernel_size(node, dimensions)
        spans = [
            step * (size - 1)
            for step, size in zip(_per_dimension(dilation, dimensions), kernel, strict=True)
        ]
        if padding == "same" and any(span % 2 for span in spans):
            return f"padding='same' needs asymmetric padding for kernel {kernel}; give the padding in numbers"
        padding = [span // 2 for span in spans] if padding == "same" else [0] * dimensions
    return (
        _per_dimension(stride, dimensions),
        _per_dimension(padding, dimensions),
        _per_dimension(dilation, dimensions),
        int(given["groups"]),
    )


def conv_groups(node: Node) -> int:
    """Number of groups of a convolution; 1 for any other layer."""
    return int(arguments_of(node).get("groups", 1))


def _per_dimension(value: Any, dimensions: int) -> list[int]:
    values = [int(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    return values * dimensions if len(values) == 1 else values


def _kernel_size(node: Node, dimensions: int) -> list[int]:
    """Taken from the int8 constant behind the weight's dequantize."""
    weight = constant_of(args_of(args_of(node)[1])[0])
    assert weight is not None
    return list(weight.shape[-dimensions:])
