"""Marks what to quantize in an exported graph; the recipe, and which layers, are a hardware package's.

The search goes by the nodes of the graph, so that it is the same for strict and non-strict export. torchao's
quantizers go by source partitions or by what exporting wrote into the nodes' metadata: they fail on ``linear(x) +
1.0`` and on a convolution that is called twice, and pass over ``conv1d`` and, after non-strict export, functional
convolutions (x86) or everything (Arm).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationConfig,
    Quantizer,
)

from versatil_core.annotations import ANNOTATION
from versatil_core.embedding_tables import annotate_embeddings
from versatil_core.module_scope import is_node_inside
from versatil_core.shared_scales import ops_with_shared_scale, share_scale
from versatil_passes.float_layers import FLOAT_LAYERS, LINEAR_AND_CONV
from versatil_passes.graph_queries import only_user

aten = torch.ops.aten

_LAYERS = frozenset(layer for layer, name in FLOAT_LAYERS.items() if name in LINEAR_AND_CONV)
_ADDITIONS = frozenset({aten.add.Tensor, aten.add_.Tensor})
# What a kernel may apply to its result before that is quantized.
_ACTIVATIONS = frozenset(
    {
        aten.relu.default,
        aten.relu_.default,
        aten.hardtanh.default,
        aten.hardtanh_.default,
        aten.relu6.default,
        aten.hardswish.default,
        aten.hardswish_.default,
        aten.silu.default,
        aten.silu_.default,
        aten.gelu.default,
    }
)


class LayerQuantizer(Quantizer):
    """Annotates linear layers, convolutions, the tables of embeddings, and what int8 passes through unchanged.

    Args:
        config: The recipe: how activations and weights are quantized.
        module_path: Annotate only inside this module; ``""`` is the whole model.
        is_dynamic: The recipe measures the scale of activations at every call. Only layers and tables are annotated
            then: nothing else has an int8 kernel with a measured scale.
        adding_layers: Layers whose kernel adds an int8 tensor to its result, as ``aten`` operators: what is added to
            them is quantized, too.
        has_kernel: Says of a linear or convolution whether the hardware has an int8 kernel for it; all others stay
            float.
        kernels_write_int8: Whether a layer's kernel can write int8. Then what several ops between such layers read,
            such as a pool and a concatenation, has one scale; otherwise that would only cost accuracy.
    """

    def __init__(
        self,
        config: QuantizationConfig,
        module_path: str = "",
        *,
        is_dynamic: bool = False,
        adding_layers: frozenset[Any] = frozenset(),
        has_kernel: Callable[[Node], bool] = lambda _: True,
        kernels_write_int8: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.module_path = module_path
        self.is_dynamic = is_dynamic
        self.adding_layers = adding_layers
        self.has_kernel = has_kernel
        self.kernels_write_int8 = kernels_write_int8

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate the nodes of ``model`` in place; nodes that carry an annotation keep theirs.

        Args:
            model: An exported module.

        Returns:
            The same module.
        """
        layers = [
            node
            for node in self._candidates(model.graph)
            if is_layer(node) and self.has_kernel(node)
        ]
        for layer in layers:
            self._annotate_layer(layer)
        annotate_embeddings(self._candidates(model.graph), is_qat=self.config.is_qat)
        if self.is_dynamic:
            return model
        last_nodes = self._annotate_residuals(layers)
        activation = self.config.input_activation
        if self.kernels_write_int8 and activation is not None:
            candidates = [node for node in self._candidates(model.graph) if not is_layer(node)]
            shared = ops_with_shared_scale(candidates, set(layers), last_nodes, activation.dtype)
            for node, inputs in shared.items():
                share_scale(node, inputs, activation)
        return model

    def validate(self, model: GraphModule) -> None:
        """Accept every annotated module."""

    def _candidates(self, graph: Graph) -> Iterable[Node]:
        for node in graph.nodes:
            if (
                node.op == "call_function"
                and ANNOTATION not in node.meta
                and is_node_inside(node, self.module_path)
            ):
                yield node

    def _annotate_layer(self, layer: Node) -> None:
        activation, weight = layer.args[:2]
        _annotate(layer, {activation: self.config.input_activation, weight: self.config.weight})

    def _annotate_residuals(self, layers: Iterable[Node]) -> set[Node]:
        """Quantize what is added to a convolution; return the last node of each fused form."""
        last_nodes = set()
        for layer in layers:
            last = layer
            addition = only_user(layer)
            if addition is not None and _adds_equal_shapes(addition):
                last = addition
                # As in torchao: a linear layer adds in float, and quantizing would cost accuracy.
                if layer.target in self.adding_layers and ANNOTATION not in addition.meta:
                    other = next(arg for arg in addition.args if arg is not layer)
                    _annotate(addition, {other: self.config.input_activation})
            activation = only_user(last)
            if activation is not None and activation.target in _ACTIVATIONS:
                last = activation
            last_nodes.add(last)
        return last_nodes


def is_layer(node: Node) -> bool:
    """Whether a node is a linear or a convolution whose weight is part of the model."""
    return (
        node.op == "call_function"
        and node.target in _LAYERS
        and isinstance(node.args[1], Node)
        and node.args[1].op == "get_attr"
        and _is_float(node.args[0])
    )


def _is_float(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return not isinstance(value, torch.Tensor) or value.dtype in {torch.float32, torch.bfloat16}


def _annotate(node: Node, input_specs: dict[Any, Any]) -> None:
    node.meta[ANNOTATION] = QuantizationAnnotation(input_qspec_map=input_specs, _annotated=True)


def _adds_equal_shapes(node: Node) -> bool:
    """Whether a node is ``a + b`` of two tensors that a kernel can add element by element."""
    if node.target not in _ADDITIONS or node.kwargs:
        return False
    values = [arg.meta.get("val") for arg in node.args if isinstance(arg, Node)]
    first, *others = values or [None]
    return (
        len(values) == 2
        and node.args[0] is not node.args[1]
        and isinstance(first, torch.Tensor)
        and all(isinstance(o, torch.Tensor) and list(o.shape) == list(first.shape) for o in others)
    )
