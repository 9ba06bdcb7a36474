"""Quantize a layer's result right behind the layer, where the only quantize comes some ops later."""

import torch
from torch.fx import Graph, Node

from versatil_passes.commuting_ops import Quantization, commuting_chain
from versatil_passes.float_layers import FLOAT_LAYERS, LINEAR_AND_CONV, post_op_of
from versatil_passes.graph_queries import only_user, set_value, value_of
from versatil_passes.int8_chain import is_dequantize
from versatil_passes.keep_int8 import static_quantizes

aten = torch.ops.aten


class QuantizeLayerOutputs:
    """Quantize and dequantize the result of a layer in front of ops that commute with its later quantize.

    ::

        before:  conv -> max_pool2d -> relu -> quantize
        after:   conv -> quantize -> dequantize -> max_pool2d -> relu -> quantize

    All with the parameters of the last quantize. The layer's kernel can then write int8 itself, and
    :class:`KeepInt8` runs the ops between on int8. Quantizing twice changes nothing, since the ops commute with it.

    Requires: a graph of aten overloads as ``convert_pt2e`` leaves it; runs after :class:`QuantLiftUp`, and before
    :class:`KeepInt8`.
    Guarantees: equal results, to the bit; existing nodes stay as they are; a second run changes nothing. Nothing is
    inserted where somebody else reads the layer's result, or what is between, as float.

    Example:
        >>> from torch.fx import symbolic_trace
        >>> QuantizeLayerOutputs()(symbolic_trace(lambda x: x.relu()).graph)
        0
    """

    runs_after = ("QuantLiftUp",)

    def __call__(self, graph: Graph) -> int:
        """Rewrite ``graph`` in place.

        Args:
            graph: Any FX graph.

        Returns:
            The number of layers whose results are quantized now.
        """
        return sum(map(_quantize_layers, static_quantizes(graph)))

    def uuid(self) -> str:
        """Identity for compile caches: this pass has no options."""
        return "versatil_passes.QuantizeLayerOutputs/1"


def _quantize_layers(quantize: Node) -> int:
    params = Quantization.of(quantize)
    if params is None or not params.is_invertible:
        return 0
    chain = commuting_chain(quantize, params, lambda node: _ends_layer(node) or is_dequantize(node))
    if chain is None or not chain.ops or not chain.is_closed:
        return 0
    layers = [leaf for leaf in chain.leaves if _ends_layer(leaf)]
    others = [leaf for leaf in chain.leaves if leaf not in layers]
    if any(Quantization.of(leaf) != params for leaf in others):
        return 0
    for layer in layers:
        _insert_pair(layer, quantize)
    return len(layers)


def _insert_pair(layer: Node, quantize: Node) -> None:
    graph, qd = layer.graph, torch.ops.quantized_decomposed
    params = quantize.args[1:]
    with graph.inserting_after(layer):
        quantized = graph.create_node(
            *("call_function", quantize.target, (layer, *params), {}, f"{layer.name}_int8")
        )
    with graph.inserting_after(quantized):
        dequantized = graph.create_node(
            *("call_function", qd.dequantize_per_tensor.default, (quantized, *params), {}),
            f"{layer.name}_float",
        )
    kept = {name: value for name, value in layer.meta.items() if name != "quantization_annotation"}
    quantized.meta, dequantized.meta = dict(kept), dict(kept)
    value = value_of(layer)
    if value is not None:
        set_value(quantized, torch.empty_like(value, dtype=params[-1]))  # type: ignore[arg-type] # a dtype
    for reader in list(layer.users):
        if reader is not quantized:
            reader.replace_input_with(layer, dequantized)


def _ends_layer(node: Node) -> bool:
    """Whether ``node`` is the last op that a quantized layer's kernel may compute, and float32."""
    value = value_of(node)
    if node.op != "call_function" or (value is not None and value.dtype is not torch.float32):
        return False
    if FLOAT_LAYERS.get(node.target) in LINEAR_AND_CONV:
        activation = node.args[0]
        return isinstance(activation, Node) and is_dequantize(activation)
    if node.target in {aten.add.Tensor, aten.add_.Tensor} or post_op_of(node) is not None:
        return any(
            only_user(source) is node and _ends_layer(source) for source in node.all_input_nodes
        )
    return False
