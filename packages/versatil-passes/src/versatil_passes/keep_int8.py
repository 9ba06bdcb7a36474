"""Run what lies between int8 layers on int8: pools, concatenations, bounds, whatever commutes with a quantize."""

import operator

import torch
from torch.fx import Graph, Node

from versatil_passes.commuting_ops import (
    CommutingChain,
    Quantization,
    commuting_chain,
    commuting_inputs,
    int8_form,
)
from versatil_passes.graph_queries import is_view_like, set_value, value_of
from versatil_passes.int8_chain import is_dequantize

_KEPT_META = frozenset({"val", "example_value", "nn_module_stack", "stack_trace"})


class KeepInt8:
    """Compute commuting ops between a dequantize and a quantize of equal parameters on int8.

    ::

        before:  q -> dequantize -> max_pool2d -> relu -> quantize -> dequantize -> conv
        after:   q -> max_pool2d -> clamp(zero_point, quant_max) -> dequantize -> conv

    For a concatenation, every branch must begin with such a dequantize. Averages stay as they are: the mean of steps
    is none, and would be rounded twice. (Inductor fuses their dequantize and quantize into the pool's own loop.)

    Requires: a graph of aten overloads as ``convert_pt2e`` leaves it; runs after :class:`QuantizeLayerOutputs`, and
    before :class:`Int8Lowering`.
    Guarantees: equal results, to the bit; what is read as float as well stays, and only the way to the quantize
    becomes int8; the int8 op that replaces a quantize names it in ``meta["replaces"]``.

    Example:
        >>> from torch.fx import symbolic_trace
        >>> KeepInt8()(symbolic_trace(lambda x: x.relu()).graph)
        0
    """

    runs_after = ("QuantLiftUp", "QuantizeLayerOutputs")

    def __call__(self, graph: Graph) -> int:
        """Rewrite ``graph`` in place.

        Args:
            graph: Any FX graph.

        Returns:
            The number of quantizes that are gone.
        """
        ranges: dict[Node, tuple[int, int]] = {}
        return sum(_keep(quantize, ranges) for quantize in static_quantizes(graph))

    def uuid(self) -> str:
        """Identity for compile caches: this pass has no options."""
        return "versatil_passes.KeepInt8/1"


def static_quantizes(graph: Graph) -> list[Node]:
    """The static per-tensor quantizes of a graph, in its order."""
    qd = torch.ops.quantized_decomposed
    if not hasattr(qd, "quantize_per_tensor"):
        return []  # nothing in this process has defined the op, so no graph can hold it
    return list(
        graph.find_nodes(op="call_function", target=qd.quantize_per_tensor.default, sort=True)
    )


def _keep(quantize: Node, ranges: dict[Node, tuple[int, int]]) -> bool:
    params = Quantization.of(quantize)
    # A result of the graph must not become a view of one of its inputs.
    if params is None or any(user.op == "output" for user in quantize.users):
        return False
    chain = commuting_chain(quantize, params, is_dequantize)
    if chain is None or not all(_gives_back(leaf, params, ranges) for leaf in chain.leaves):
        return False
    int8: dict[Node, Node] = {leaf: leaf.args[0] for leaf in chain.leaves}  # type: ignore[misc] # nodes
    sources = set(int8.values())
    with quantize.graph.inserting_before(quantize):
        for op in chain.ops:
            int8[op] = _on_int8(op, int8, params)
    result = int8[quantize.args[0]]  # type: ignore[index] # a node
    if result not in sources:
        operators = [str(op.target).split(".")[1] for op in chain.ops if "." in str(op.target)]
        dtype = str(params.dtype).removeprefix("torch.")
        result.meta["replaces"] = quantize.name
        result.meta["lowered_as"] = f"{' + '.join(operators) or 'view'} -> {dtype}"
        ranges[result] = params.quant_min, params.quant_max
    quantize.replace_all_uses_with(result)
    quantize.graph.erase_node(quantize)
    _erase_unread(chain)
    return True


def _on_int8(op: Node, int8: dict[Node, Node], params: Quantization) -> Node:
    result = int8_form(op, int8, params)
    if result not in int8.values():
        result.meta.update({name: op.meta[name] for name in _KEPT_META & op.meta.keys()})
        value = value_of(op)
        if value is not None:
            set_value(result, torch.empty_like(value, dtype=params.dtype))
    return result


def _gives_back(leaf: Node, params: Quantization, ranges: dict[Node, tuple[int, int]]) -> bool:
    """Whether the quantize of ``params`` gives back what ``leaf`` dequantizes."""
    source = leaf.args[0] if is_dequantize(leaf) else None
    if not isinstance(source, Node) or Quantization.of(leaf) != params:
        return False
    low, high = _range_of(source, params.dtype, ranges)
    return params.is_invertible and params.quant_min <= low and high <= params.quant_max


def _range_of(
    node: Node, dtype: torch.dtype, ranges: dict[Node, tuple[int, int]]
) -> tuple[int, int]:
    """The least and the largest value that an int8 tensor may hold."""
    while is_view_like(node):
        (node,) = commuting_inputs(node, dtype) or [node]
    if node in ranges:
        return ranges[node]
    params = Quantization.of(node)
    if params is not None:
        return params.quant_min, params.quant_max
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _erase_unread(chain: CommutingChain) -> None:
    """Erase what only the quantize has read; in-place ops too, whose results nobody else sees."""
    parts = [node for node in chain.ops if node.target is operator.getitem]
    splits = dict.fromkeys(part.all_input_nodes[0] for part in parts)
    for op in reversed(chain.ops):
        if not op.users:
            op.graph.erase_node(op)
    for split in splits:
        _erase_unread_split(split)
    for leaf in chain.leaves:
        if not leaf.users:
            leaf.graph.erase_node(leaf)


def _erase_unread_split(split: Node) -> None:
    """Erase a chunk or split none of whose parts is read; exporting lists all of them."""
    parts = list(split.users)
    if any(part.target is not operator.getitem or part.users for part in parts):
        return
    for node in (*parts, split):
        node.graph.erase_node(node)
