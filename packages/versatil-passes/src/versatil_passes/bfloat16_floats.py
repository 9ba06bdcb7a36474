"""Make the float parts of a reference bfloat16, and say exactly where a value is rounded to it."""

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from versatil_passes._torch_compat import same_shape
from versatil_passes.bfloat16_casts import (
    BFLOAT16,
    Casts,
    dtype_of,
    is_cast,
    replace_readers,
    set_dtype,
)
from versatil_passes.bfloat16_constants import LARGEST
from versatil_passes.float_layers import FLOAT_LAYERS, LINEAR_AND_CONV, post_op_of
from versatil_passes.graph_queries import (
    is_mutating,
    is_view_like,
    only_user,
    set_value,
    value_of,
)
from versatil_passes.int8_chain import is_dequantize, next_op
from versatil_passes.int8_embedding import EMBEDDINGS

aten = torch.ops.aten

_AS_ANOTHER = frozenset({aten.type_as.default, aten.to.other})


class Bfloat16Floats:
    """Make every float value from the first layer on bfloat16.

    ::

        before:  dequantize -> linear -> gelu -> layer_norm -> quantize             float32
        after:   dequantize -> linear -> gelu  float32 -> to bfloat16 -> layer_norm bfloat16 -> quantize

    An int8 layer, together with the addition and the function behind it that its kernel may compute as well, gives
    the exact float32 result, which is rounded once; that is what the kernels do that write bfloat16. Where an int8
    layer hands its result to a quantize, no float is ever stored, and nothing is rounded. The same goes for ops
    between a dequantize and a quantize, such as pooling.

    What comes before the first layer, such as positions, masks and the model's own float inputs, stays float32 until
    it meets a bfloat16 value: a position above 256 has no exact bfloat16. Casts to float32 that the model itself
    makes stay, as they would if its weights were bfloat16. Numbers that bfloat16 does not reach, such as the lowest
    float32 in an attention mask, become its own largest.

    Requires: a graph as ``convert_pt2e`` leaves it, in float32, in bfloat16, or mixed.
    Guarantees: inputs keep their dtypes; no int8 layer is left that computes in bfloat16. A second run changes nothing.

    Args:
        only_layers: Leave all float values as they are, and only round once behind the int8 layers of a model whose
            weights are bfloat16.
    """

    def __init__(self, *, only_layers: bool = False) -> None:
        """Keep the option."""
        self.only_layers = only_layers

    def __call__(self, graph: Graph) -> int:
        """Rewrite ``graph`` in place; its module gets new constants.

        Args:
            graph: The graph of a reference.

        Returns:
            The number of int8 layers whose result is rounded to bfloat16.
        """
        casts = Casts(graph)
        layers = [node for node in graph.nodes if _is_int8_layer(node)]
        if self.only_layers:
            layers = [layer for layer in layers if dtype_of(layer) is BFLOAT16]
        tails = _tails(layers)
        rounded = sum(_settle(layer, tails[layer], casts) for layer in layers)
        settled = {node for tail in tails.values() for node in tail} | _between_int8(graph)
        _settle_quantization(graph, settled, casts)
        if not self.only_layers:
            _limit_numbers(graph)
            _spread(graph, settled, casts)
        _drop_outdated_checks(graph)
        casts.constants.take_names()
        return rounded


def _is_int8_layer(node: Node) -> bool:
    if node.op != "call_function":
        return False
    name = FLOAT_LAYERS.get(node.target)
    quantized = 2 if name in LINEAR_AND_CONV else 1 if name in EMBEDDINGS else 0
    return quantized > 0 and all(
        isinstance(arg, Node) and is_dequantize(arg) for arg in node.args[:quantized]
    )


def _tails(layers: list[Node]) -> dict[Node, tuple[Node, ...]]:
    """Each layer with the addition and the function behind it, which its kernel may compute in float32 as well."""
    tails: dict[Node, tuple[Node, ...]] = {}
    taken: set[Node] = set()
    # As the lowering does it: of two layers that are added the later one absorbs the addition.
    for layer in reversed(layers):
        tail = [layer]
        if FLOAT_LAYERS[layer.target] in EMBEDDINGS:  # no kernel: nothing is computed as well
            # A bag's results are a tuple, of which the lowering takes only the first.
            tail += [user for user in layer.users if user.target is operator.getitem and user.users]
            tails[layer] = tuple(tail)
            continue
        addition = next_op(layer, {aten.add.Tensor, aten.add_.Tensor})
        if addition is not None and addition not in taken and _adds_to(addition, layer):
            tail.append(addition)
        function = next_op(tail[-1])
        if (
            function is not None
            and post_op_of(function) is not None
            and dtype_of(function) is dtype_of(layer)
        ):
            tail.append(function)
        taken.update(tail)
        tails[layer] = tuple(tail)
    return tails


def _adds_to(addition: Node, layer: Node) -> bool:
    """Whether ``addition`` adds a tensor of the same shape and dtype to the result of ``layer``."""
    first, second = addition.args[:2]
    other = second if first is layer else first
    ours, theirs = value_of(layer), value_of(other) if isinstance(other, Node) else None
    return (
        other is not layer
        and "alpha" not in addition.kwargs
        and not (addition.target is aten.add_.Tensor and second is layer)
        and ours is not None
        and theirs is not None
        and dtype_of(other) is dtype_of(layer) is dtype_of(addition)
        and same_shape(ours, theirs)
    )


def _settle(layer: Node, tail: tuple[Node, ...], casts: Casts) -> bool:
    """Compute a layer with its tail in float32; return whether the result is rounded to bfloat16."""
    for node in tail:
        for argument in node.all_input_nodes:
            if dtype_of(argument) is BFLOAT16 and is_dequantize(argument):
                node.replace_input_with(argument, _in_float32(argument))
    for argument in layer.all_input_nodes:
        if dtype_of(argument) is BFLOAT16 and argument.op == "get_attr":
            layer.replace_input_with(argument, casts.of(argument, torch.float32))
    for node in tail:
        set_dtype(node, BFLOAT16, torch.float32)
    last = tail[-1]
    if _is_quantized_next(last) or _is_rounded_next(last):
        return False
    replace_readers(last, casts.of(last, BFLOAT16), except_for=())
    return True


def _in_float32(dequantize: Node) -> Node:
    with dequantize.graph.inserting_after(dequantize):
        wide = dequantize.graph.node_copy(dequantize)
    wide.kwargs = {key: value for key, value in wide.kwargs.items() if key != "out_dtype"}
    set_dtype(wide, BFLOAT16, torch.float32)
    return wide


def _is_quantized_next(node: Node) -> bool:
    """Whether a quantize with fixed scale is all that reads ``node``, or a view of it."""
    reader = only_user(node)
    while reader is not None and is_view_like(reader):
        reader = only_user(reader)
    return reader is not None and reader.target is _quantize()


def _is_rounded_next(node: Node) -> bool:
    return bool(node.users) and all(is_cast(user, BFLOAT16) for user in node.users)


def _quantize() -> Any:
    return torch.ops.quantized_decomposed.quantize_per_tensor.default


def _between_int8(graph: Graph) -> set[Node]:
    """The float values that only lead from dequantizes to quantizes: none of them needs to be stored."""
    floats = {torch.float32, BFLOAT16}
    found: set[Node] = set()
    for node in graph.nodes:
        sources = [arg for arg in node.all_input_nodes if dtype_of(arg) in floats]
        if (
            node.op == "call_function"
            and node.target not in FLOAT_LAYERS
            and dtype_of(node) in floats
            and not is_dequantize(node)
            and sources
            and all(is_dequantize(arg) or arg in found for arg in sources)
        ):
            found.add(node)
    for node in reversed(graph.nodes):
        if node in found and not all(
            user in found or user.target is _quantize() for user in node.users
        ):
            found.discard(node)
    return found


def _settle_quantization(graph: Graph, settled: set[Node], casts: Casts) -> None:
    """Let dequantize and choose_qparams compute in float32, as kernels do, and what is settled read that.

    The eager ``choose_qparams`` would subtract and divide in bfloat16.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node in settled:
            set_dtype(node, BFLOAT16, torch.float32)
        if str(node.target).startswith("quantized_decomposed.choose_qparams"):
            _widen_measured(node, casts)
        if is_dequantize(node) and dtype_of(node) is BFLOAT16:
            wide = _in_float32(node)
            replace_readers(node, wide, except_for=set(node.users) - settled)
            if node.users:
                replace_readers(node, casts.of(wide, BFLOAT16), except_for=())
            graph.erase_node(node)


def _widen_measured(node: Node, casts: Casts) -> None:
    measured = node.args[0]
    if isinstance(measured, Node) and dtype_of(measured) is BFLOAT16:
        node.replace_input_with(measured, casts.of(measured, torch.float32))


def _spread(graph: Graph, settled: set[Node], casts: Casts) -> None:
    """Bring every op that reads a bfloat16 value, and every float layer, to bfloat16."""
    for node in list(graph.nodes):
        if node in settled or node.op != "call_function":
            continue
        if is_dequantize(node):
            if set(node.users) - settled:
                replace_readers(node, casts.of(node, BFLOAT16), except_for=settled)
            continue
        if str(node.target).startswith("quantized_decomposed.choose_qparams"):
            _widen_measured(node, casts)
            continue
        if node.target is operator.getitem:
            _set_item(node)
            continue
        halves = [arg for arg in node.all_input_nodes if dtype_of(arg) is BFLOAT16]
        if not halves and not (node.target in FLOAT_LAYERS and dtype_of(node) is torch.float32):
            continue
        _to_bfloat16(node, halves, casts)


def _to_bfloat16(node: Node, halves: list[Node], casts: Casts) -> None:
    """Bring one op to bfloat16, if its result is a float that it chooses the dtype of by its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload) or _reads_complex(node):
        # A whole program in an op, or numbers that have no half: in float32.
        for half in halves:
            node.replace_input_with(half, casts.of(half, torch.float32))
        return
    if is_mutating(node) or node.target in _AS_ANOTHER:
        like = node.args[1] if node.target in _AS_ANOTHER else node.args[0]
        dtype = dtype_of(like)
        if dtype is not None:
            set_dtype(node, dtype_of(node), dtype)
        return
    has_own_dtype = any(isinstance(arg, torch.dtype) for arg in (*node.args, *node.kwargs.values()))
    if has_own_dtype or not _gives(node, torch.float32):
        return

    def cast(argument: Node) -> Node:
        is_float = dtype_of(argument) is torch.float32
        return casts.of(argument, BFLOAT16) if is_float else argument

    node.args = map_arg(node.args, cast)
    node.kwargs = map_arg(node.kwargs, cast)
    set_dtype(node, torch.float32, BFLOAT16)


def _gives(node: Node, dtype: torch.dtype) -> bool:
    values = node.meta.get("val")
    parts = values if isinstance(values, (tuple, list)) else [values]
    return any(isinstance(part, torch.Tensor) and part.dtype is dtype for part in parts)


def _reads_complex(node: Node) -> bool:
    dtypes = [dtype_of(each) for each in (node, *node.all_input_nodes)]
    return any(dtype is not None and dtype.is_complex for dtype in dtypes)


def _set_item(node: Node) -> None:
    owner, index = node.args
    values = owner.meta.get("val") if isinstance(owner, Node) else None
    if isinstance(values, (tuple, list)) and isinstance(index, int):
        set_value(node, values[index])


def _limit_numbers(graph: Graph) -> None:
    """Bring finite numbers that bfloat16 would round to infinity into its range."""

    def limited(value: Any) -> Any:
        is_beyond = isinstance(value, float) and LARGEST < abs(value) < math.inf
        return math.copysign(LARGEST, value) if is_beyond else value

    for node in graph.nodes:
        if node.op == "call_function" and not str(node.target).startswith("quantized_decomposed."):
            node.args = map_aggregate(node.args, limited)
            node.kwargs = map_aggregate(node.kwargs, limited)


def _drop_outdated_checks(graph: Graph) -> None:
    """Remove the checks of dtypes that export writes before a model's own casts, where the dtype is another now."""
    checks = graph.find_nodes(
        op="call_function",
        target=aten._assert_tensor_metadata.default,  # noqa: SLF001 - its public name
    )
    for check in checks:
        expected = check.kwargs.get("dtype")
        if expected is not None and dtype_of(check.args[0]) is not expected:
            graph.erase_node(check)
