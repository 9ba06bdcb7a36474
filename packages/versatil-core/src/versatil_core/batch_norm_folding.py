"""Batch norms behind int8 layers: the weight is rounded as it will be when the batch norm is folded into it.

While a graph is annotated, its batch norms are out of the way, so that what gets quantized is what
:func:`versatil_core.quantize` would quantize. For training each comes back behind its layer::

    weight -> * factor -> fake quantization -> layer -> / factor -> + bias -> batch norm

with the factor ``gamma / sqrt(running_var + eps)`` of each output channel, by which folding multiplies. What a layer
computes stays the same; only the rounding is that of the folded weight.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from versatil_core.annotations import rename_inputs
from versatil_core.mode_modules import BatchNorm
from versatil_core.parameter_names import add_constant, free_name, remove_constant
from versatil_passes.float_layers import FLOAT_LAYERS, LINEAR_AND_CONV, TRANSPOSED_CONVOLUTIONS
from versatil_passes.graph_queries import (
    arguments_of,
    constant_of,
    erase_unread,
    only_user,
    value_of,
)


@dataclass(frozen=True)
class TakenNorm:
    """A batch norm that is out of the graph.

    Attributes:
        path: Where it is among the submodules.
        module: The batch norm. torchao drops submodules that no node calls.
    """

    path: str
    module: BatchNorm


def fold_for_inference(exported: GraphModule) -> None:
    """Fold the batch norms of a model that is not trained any more, in place.

    torchao's own folding is wrong where a layer that is called twice has two batch norms or only one, and where
    something else than the batch norm reads a layer's output.

    Args:
        exported: After :func:`versatil_core.mode_modules.put_batch_norms`.
    """
    fold_batch_norms(exported, {layer.name: str(norm.target) for layer, norm in _pairs(exported)})


def take_batch_norms(exported: GraphModule) -> dict[str, TakenNorm]:
    """Take the batch norms that can be folded out of a graph, in place.

    Args:
        exported: After :func:`versatil_core.mode_modules.put_batch_norms`.

    Returns:
        Name of a layer's node -> the batch norm that was behind it.
    """
    taken = {}
    for layer, node in _pairs(exported):
        path = str(node.target)
        taken[layer.name] = TakenNorm(path, _norm_at(exported, path))
        node.replace_all_uses_with(layer)
        exported.graph.erase_node(node)
    exported.recompile()
    return taken


def _pairs(exported: GraphModule) -> list[tuple[Node, Node]]:
    """The layers with a batch norm behind them that can be folded into them."""
    return [
        (node.args[0], node)
        for node in exported.graph.find_nodes(op="call_module")
        if isinstance(norm := exported.get_submodule(str(node.target)), BatchNorm)
        and not norm.always_by_batch
        and _can_take(node.args[0])
    ]


def _norm_at(module: GraphModule, path: str) -> BatchNorm:
    norm = module.get_submodule(path)
    assert isinstance(norm, BatchNorm)
    return norm


def _can_take(layer: Node) -> bool:
    """Whether a node is a layer that only the batch norm reads, with as many channels."""
    output = value_of(layer)
    name = FLOAT_LAYERS.get(layer.target) if layer.op == "call_function" else None
    if output is None or only_user(layer) is None or layer.kwargs:
        return False
    if name in TRANSPOSED_CONVOLUTIONS:
        is_layer = arguments_of(layer)["groups"] == 1
    else:
        is_layer = name in LINEAR_AND_CONV
    weight, bias = constant_of(layer.args[1]) if is_layer else None, _bias(layer)
    # Without a batch axis, or with one more, a linear or conv1d has its channels elsewhere.
    return (
        weight is not None
        and output.dim() == weight.dim()
        and (bias is None or constant_of(bias) is not None)
    )


def _channel_axis(layer: Node) -> int:
    """Which axis of its weight has the output channels."""
    return int(FLOAT_LAYERS[layer.target] in TRANSPOSED_CONVOLUTIONS)


def _bias(layer: Node) -> Any:
    return layer.args[2] if len(layer.args) > 2 else None


def put_batch_norms_behind(prepared: GraphModule, taken: Mapping[str, TakenNorm]) -> None:
    """Put the batch norms back behind their layers, in place, for training.

    Args:
        prepared: With fake quantization.
        taken: From :func:`take_batch_norms`.
    """
    for norm in taken.values():
        prepared.add_submodule(norm.path, norm.module)
    norms = {name: norm.path for name, norm in taken.items()}
    layers = {node.name: node for node in prepared.graph.nodes if node.name in norms}
    own = _own_fakes(prepared, {layers[name]: path for name, path in norms.items()})
    factors: dict[Node, Node] = {}
    new: dict[Node, Node] = {}
    for name, path in norms.items():
        layer = last = layers[name]
        fake = own.get(layer)
        readers = [*layer.users]
        if fake is not None:
            if fake not in factors:
                factors[fake] = _scale_weight(prepared, fake, path, _channel_axis(layer))
            with prepared.graph.inserting_after(layer):
                last = prepared.graph.call_function(unscaled, (layer, factors[fake], _bias(layer)))
            layer.args = (*layer.args[:2], None, *layer.args[3:])
        with prepared.graph.inserting_after(last):
            behind = prepared.graph.call_module(path, (last,))
        behind.meta = dict(layer.meta)
        for reader in readers:
            reader.replace_input_with(layer, behind)
        new[layer] = behind
    rename_inputs(prepared.graph, new)
    prepared.recompile()


def _own_fakes(prepared: GraphModule, norms: Mapping[Node, str]) -> dict[Node, Node]:
    """Give each weight a fake quantization for each batch norm behind it; return that of each quantized layer."""
    own: dict[tuple[Node, str], Node] = {}
    found: dict[Node, Node] = {}
    for layer, path in norms.items():
        fake = layer.args[1]
        if not isinstance(fake, Node) or fake.op != "call_module":
            continue
        if (fake, path) not in own:
            is_alone = all(norms.get(reader) == path for reader in fake.users)
            own[fake, path] = fake if is_alone else _copy_of(prepared, fake)
        found[layer] = own[fake, path]
    for layer, fake in found.items():
        before = layer.args[1]
        layer.args = (layer.args[0], fake, *layer.args[2:])
        erase_unread([before])
    return found


def _copy_of(prepared: GraphModule, fake: Node) -> Node:
    path = free_name(prepared, f"{fake.target}_copy")
    prepared.add_submodule(path, copy.deepcopy(prepared.get_submodule(str(fake.target))))
    with prepared.graph.inserting_after(fake):
        node = prepared.graph.call_module(path, fake.args)
    node.meta = dict(fake.meta)
    return node


def _scale_weight(prepared: GraphModule, fake: Node, path: str, axis: int) -> Node:
    norm = _norm_at(prepared, path)
    graph, weight = prepared.graph, fake.args[0]
    with graph.inserting_before(fake):
        gamma = None if norm.weight is None else graph.get_attr(f"{path}.weight")
        variance = graph.get_attr(f"{path}.running_var")
        factor = graph.call_function(nonzero_factor, (gamma, variance, norm.eps))
        scaled = graph.call_function(scaled_weight, (weight, factor, axis))
    fake.args = (scaled,)
    return factor


@torch.no_grad()
def nonzero_factor(gamma: torch.Tensor | None, variance: torch.Tensor, eps: float) -> torch.Tensor:
    """By how much a weight is multiplied while it is rounded; without a gradient.

    That is what folding multiplies it by. Where gamma is 0, and the folded weight will be, too, it is as if gamma
    were 1: the layer's output is needed to learn gamma.

    Args:
        gamma: The batch norm's weight, float ``[channels]``; None is 1.
        variance: Its running variance, float ``[channels]``.
        eps: Added to the variance.
    """
    if gamma is None:
        return _factor(None, variance, eps)
    return _factor(torch.where(gamma == 0, 1, gamma), variance, eps)


def _factor(gamma: torch.Tensor | None, variance: torch.Tensor, eps: float) -> torch.Tensor:
    return (1 if gamma is None else gamma) / torch.sqrt(variance + eps)


def scaled_weight(weight: torch.Tensor, factor: torch.Tensor, axis: int) -> torch.Tensor:
    """Multiply a weight by a factor for each index along an axis."""
    shape = [1] * weight.dim()
    shape[axis] = -1
    return weight * factor.to(weight.dtype).view(shape)


def unscaled(output: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Divide a layer's output ``[batch, channels, ...]`` by the factors, and add its bias."""
    shape = (1, -1, *[1] * (output.dim() - 2))
    plain = output / factor.to(output.dtype).view(shape)
    return plain if bias is None else plain + bias.view(shape)


def fold_batch_norms(trained: GraphModule, norms: Mapping[str, str]) -> None:
    """Fold the batch norms into the layers before them, in place.

    Args:
        trained: A copy of what :func:`put_batch_norms_behind` made, or a model that was never trained. It gets new
            parameters; those that it has are left as they are.
        norms: Name of a layer's node -> path of the batch norm behind it.
    """
    layers = {node.name: node for node in trained.graph.nodes if node.name in norms}
    folded: dict[tuple[str, str], tuple[Node, Node]] = {}
    values: dict[Node, tuple[str, torch.Tensor]] = {}
    replaced: dict[Node, Node] = {}
    for name, path in norms.items():
        layer = layers[name]
        last = only_user(layer)
        assert last is not None
        bias = _bias(layer)
        if last.target is unscaled:
            bias, last = last.args[2], only_user(last)
            assert last is not None
        weight = _float_weight(layer)
        key = (str(weight.target), path)
        if key not in folded:
            with trained.graph.inserting_before(weight):
                nodes = (trained.graph.get_attr(key[0]), trained.graph.get_attr(key[0]))
            folded[key] = nodes
            nodes[0].meta = dict(weight.meta)
            new = folded_tensors(
                _norm_at(trained, path),
                constant_of(weight),
                constant_of(bias),
                _channel_axis(layer),
            )
            at = str(bias.target) if bias is not None else _bias_name(key[0])
            values.update(zip(nodes, zip((key[0], at), new, strict=True), strict=True))
        _read_folded(layer, *folded[key])
        replaced |= {last: layer, weight: folded[key][0]}
        last.replace_all_uses_with(layer)
        erase_unread([last])
        for between in [*layer.users]:
            if between.target is unscaled:
                trained.graph.erase_node(between)
    rename_inputs(trained.graph, replaced)
    _erase_leftovers(trained)
    _name_constants(trained, values)
    trained.recompile()


def _float_weight(layer: Node) -> Node:
    """The constant that a layer's weight is made from."""
    node = layer.args[1]
    while isinstance(node, Node) and node.op != "get_attr":
        node = node.args[0]
    assert isinstance(node, Node)
    return node


def _bias_name(weight: str) -> str:
    folder, dot, attribute = weight.rpartition(".")
    return folder + dot + (attribute.removesuffix("weight") + "bias")


@torch.no_grad()
def folded_tensors(
    norm: BatchNorm, weight: torch.Tensor | None, bias: torch.Tensor | None, axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias of a layer that does what a layer and a batch norm in eval mode do.

    Args:
        norm: The batch norm.
        weight: The layer's, float, any shape.
        bias: The layer's, float ``[out_channels]``, or None.
        axis: Which axis of the weight has the output channels.
    """
    mean, variance = norm.running_mean, norm.running_var
    assert weight is not None
    assert mean is not None
    assert variance is not None
    # The same steps as in training, so that the weight is rounded to the same.
    factor = _factor(norm.weight, variance, norm.eps)
    offset = (-mean if bias is None else bias - mean) * factor
    if norm.bias is not None:
        offset = offset + norm.bias
    return scaled_weight(weight, factor, axis), offset.to(weight.dtype)


def _read_folded(layer: Node, weight: Node, bias: Node) -> None:
    fake = layer.args[1]
    if isinstance(fake, Node) and fake.op == "call_module":
        fake.args = (weight,)
        weight_argument = fake
    else:
        weight_argument = weight
    layer.args = (layer.args[0], weight_argument, bias, *layer.args[3:])


def _erase_leftovers(trained: GraphModule) -> None:
    """Erase what scaled the weights; it has no effects."""
    for function in (scaled_weight, nonzero_factor):
        for node in trained.graph.find_nodes(op="call_function", target=function):
            erase_unread([node])
    for node in trained.graph.find_nodes(op="get_attr"):
        erase_unread([node])


def _name_constants(trained: GraphModule, values: Mapping[Node, tuple[str, torch.Tensor]]) -> None:
    """Give new constants their values, under the names of those that they replace where nothing else reads them."""
    gets = trained.graph.find_nodes(op="get_attr")
    read = {str(get.target) for get in gets if get not in values}
    for name in {name for name, _ in values.values()} - read:
        if free_name(trained, name) != name:
            remove_constant(trained, name)
    for node, (wanted, value) in values.items():
        if not node.users:
            continue
        node.target = free_name(trained, wanted)
        add_constant(trained, node.target, torch.nn.Parameter(value, requires_grad=False))
