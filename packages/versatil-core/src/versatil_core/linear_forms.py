"""Writes every product of an activation and a weight as the operator that is quantized, ``aten.linear``.

``x @ w``, ``x @ w.t()``, ``torch.addmm``, ``torch.mm`` and ``torch.einsum`` are what ``nn.Linear`` is, written by
hand. Quantizers and kernels know one form.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from versatil_core.constant_operands import fold_constants, is_constant
from versatil_passes.float_layers import FLOAT_LAYERS, LINEAR_AND_CONV
from versatil_passes.graph_queries import args_of, is_mutating, nodes_between, only_user, value_of
from versatil_passes.int8_embedding import EMBEDDINGS

aten = torch.ops.aten

_WEIGHT_AND_BIAS: dict[Any, tuple[int, ...]] = {
    **{layer: (1, 2) for layer, name in FLOAT_LAYERS.items() if name in LINEAR_AND_CONV},
    **{layer: (0,) for layer, name in FLOAT_LAYERS.items() if name in EMBEDDINGS},
}
"""Which arguments of a layer have to be constants."""


@dataclass(frozen=True)
class _Product:
    """``x @ weight.t() + bias``, or with ``is_transposed`` ``x @ weight + bias``."""

    x: Node
    weight: Node
    bias: Node | None = None
    is_transposed: bool = True


def write_as_linears(module: GraphModule) -> None:
    """Write products with weights as ``aten.linear``, and make weights and biases constants.

    Args:
        module: An exported module; changed in place. It computes the same, up to the order of additions.
    """
    for node in [*module.graph.nodes]:
        product = _product(node) if node.op == "call_function" else None
        if product is not None:
            _take_bias(_to_linear(node, product))
    fold_constants(
        module,
        [
            node.args[index]
            for node in module.graph.nodes
            for index in _WEIGHT_AND_BIAS.get(node.target, ())
            if index < len(node.args) and isinstance(node.args[index], Node)
        ],
    )


def _product(node: Node) -> _Product | None:
    """Read a node as a product with a weight; None if it is something else."""
    args: tuple[Any, ...] = args_of(node)
    if node.target in {aten.matmul.default, aten.mm.default}:
        found = _Product(*args[:2])
    elif node.target is aten.addmm.default and not node.kwargs and len(args) == 3:
        bias, x, weight = args
        found = _Product(x, weight, bias if _is_bias(bias, weight) else None)
        if found.bias is None:
            return None
    elif node.target is aten.einsum.default and len(args[1]) == 2:
        form = einsum_form(args[0])
        if form is None:
            return None
        x, weight = args[1]
        found = _Product(x, weight, is_transposed=form)
    else:
        return None
    return found if _is_layer(found) else None


def _is_layer(product: _Product) -> bool:
    """Whether it multiplies rows of a float activation by a matrix of the model."""
    x, weight = value_of(product.x), value_of(product.weight)
    return (
        x is not None
        and weight is not None
        and x.dim() >= 2
        and weight.dim() == 2
        and x.dtype == weight.dtype
        and x.dtype.is_floating_point
        and is_constant(product.weight)
    )


def einsum_form(equation: str) -> bool | None:
    """Say whether an einsum is a linear layer.

    Returns:
        True if it multiplies the last axis of its first operand by ``weight[in, out]``, False by
        ``weight[out, in]``, None if it does anything else.

    Example:
        >>> einsum_form("bsi,io->bso"), einsum_form("...i,oi->...o"), einsum_form("bij,bjk->bik")
        (True, False, None)
    """
    text = equation.replace(" ", "").replace("...", ".")
    operands, arrow, result = text.partition("->")
    x, comma, weight = operands.partition(",")
    if not (arrow and comma and x and result and len(weight) == 2) or "." in weight:
        return None
    inner, outer = x[-1], result[-1]
    letters = [*x, outer]
    if x[:-1] != result[:-1] or len(set(letters)) != len(letters) or inner == ".":
        return None
    return {inner + outer: True, outer + inner: False}.get(weight)


def _to_linear(node: Node, product: _Product) -> Node:
    graph = node.graph
    with graph.inserting_before(node):
        weight, value = product.weight, value_of(product.weight)
        if product.is_transposed:
            weight = graph.call_function(aten.t.default, (weight,))
            if value is not None:
                weight.meta["val"] = value.t()
        bias = () if product.bias is None else (product.bias,)
        linear = graph.call_function(aten.linear.default, (product.x, weight, *bias))
    linear.meta = dict(node.meta)
    node.replace_all_uses_with(linear)
    graph.erase_node(node)
    return linear


def _take_bias(linear: Node) -> None:
    """Let a linear without a bias take the constant that is added to it."""
    addition = only_user(linear)
    if len(linear.args) > 2 or addition is None or addition.target is not aten.add.Tensor:
        return
    others = [other for other in addition.args if isinstance(other, Node) and other is not linear]
    if len(others) != 1 or addition.kwargs or not _is_bias(others[0], linear):
        return
    # The product moves to where the addition is, and its input may be another by then.
    if any(map(is_mutating, nodes_between(linear, addition))):
        return
    with linear.graph.inserting_before(addition):
        whole = linear.graph.call_function(aten.linear.default, (*linear.args, others[0]))
    whole.meta = {**addition.meta, **linear.meta}
    addition.replace_all_uses_with(whole)
    for node in (addition, linear):
        linear.graph.erase_node(node)


def _is_bias(node: Node, like: Node) -> bool:
    """Whether it is a constant with one value for each feature along the last axis of ``like``, of its dtype."""
    value, wanted = value_of(node), value_of(like)
    return (
        value is not None
        and wanted is not None
        and tuple(value.shape) == (wanted.shape[-1],)
        and value.dtype == wanted.dtype
        and is_constant(node)
    )
