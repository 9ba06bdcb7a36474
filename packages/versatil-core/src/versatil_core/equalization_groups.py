"""Which linear layers read one tensor, and where a factor for each of its channels can go."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from versatil_core import _torch_compat
from versatil_passes.float_layers import FLOAT_LAYERS, LINEAR_AND_CONV
from versatil_passes.graph_queries import (
    arguments_of,
    constant_of,
    is_view_like,
    is_written,
    only_user,
    value_of,
)

aten = torch.ops.aten

# ``f(s * x) = s * f(x)`` for every positive s, element by element.
_HOMOGENEOUS = frozenset({aten.relu.default, aten.relu_.default, aten.dropout.default})
# What comes between a layer and an int8 result: in its kernel, or on int8.
_ON_THE_WAY = _HOMOGENEOUS | {
    aten.add.Tensor,
    aten.add_.Tensor,
    aten.gelu.default,
    aten.silu.default,
    aten.hardswish.default,
    aten.hardtanh.default,
    aten.relu6.default,
    aten.max_pool2d.default,
    aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default,
}


@dataclass(frozen=True)
class LinearGroup:
    """The linear layers that read one tensor, and so must share its factors.

    Attributes:
        source: The tensor, float ``[..., in_features]``.
        layers: ``aten.linear`` nodes that read it.
        producer: The layer norm or linear layer whose parameters can take the factors; None if
            only a multiply can, since nothing suits or something else reads ``source``.
        kernel_before: The layer (``"linear"``, ``"conv2d"``, ...) whose kernel may write
            ``source`` in int8 by itself, which a multiply would end; ``""`` if there is none.
        fault: Why the group can't be equalized; ``""`` if it can.
    """

    source: Node
    layers: tuple[Node, ...]
    producer: Node | None
    kernel_before: str
    fault: str

    @property
    def channels(self) -> int:
        """Number of input features."""
        return weight_of(self.layers[0]).shape[1]


def linear_groups(exported: GraphModule) -> tuple[LinearGroup, ...]:
    """Find the groups, in the order of the graph.

    Args:
        exported: From :func:`versatil_core.export.export`.
    """
    layers = defaultdict(list)
    for node in exported.graph.find_nodes(op="call_function", target=aten.linear.default):
        if isinstance(node.args[0], Node) and constant_of(node.args[1]) is not None:
            layers[node.args[0]].append(node)
    readers = _readers_of_constants(exported)
    return tuple(_group(source, tuple(group), readers) for source, group in layers.items())


def weight_of(layer: Node) -> torch.Tensor:
    """The weight of a layer of a group, float ``[out_features, in_features]``."""
    weight = constant_of(layer.args[1])
    assert weight is not None
    return weight


Readers = Mapping[int, frozenset[Node]]


def _group(source: Node, layers: tuple[Node, ...], readers: Readers) -> LinearGroup:
    channels = weight_of(layers[0]).shape[1]
    is_private = set(source.users) == set(layers)
    producer = _producer(source, channels) if is_private else None
    if producer is not None and not _can_take_factors(producer, readers):
        producer = None
    kernel = _kernel_before(source) if is_private else ""
    return LinearGroup(source, layers, producer, kernel, _fault(source, layers, readers))


def _fault(source: Node, layers: tuple[Node, ...], readers: Readers) -> str:
    for layer in layers:
        weight = weight_of(layer)
        if not readers[_memory(weight)].issubset(layers):
            return f"its weight is shared: something else also reads {layer.args[1]}"
        if not weight.is_floating_point() or weight.dim() != 2:
            return f"its weight is {weight.dtype} with {weight.dim()} dimensions"
    if is_written(source):
        return "an op writes to its input in place"
    return ""


def _producer(source: Node, channels: int) -> Node | None:
    """Walk back from the tensor, over ops that a factor for each channel passes through, alone."""
    node = source
    while _passes_factors(node, channels):
        before = node.all_input_nodes[0]
        if only_user(before) is None:
            return None
        node = before
    return node


def _passes_factors(node: Node, channels: int) -> bool:
    """Whether multiplying the last dimension before or after ``node`` is the same."""
    if node.op != "call_function":
        return False
    if node.target in _HOMOGENEOUS:
        return node.target is not aten.dropout.default or not arguments_of(node)["train"]
    return is_view_like(node) and _keeps_last_dimension(node, channels)


def _keeps_last_dimension(node: Node, channels: int) -> bool:
    """Let ``node`` move the numbers of the channels, and look where they are then."""
    before = value_of(node.args[0])  # type: ignore[arg-type] # a view-like node has one
    if before is None or before.dim() == 0 or before.shape[-1] != channels:
        return False
    numbers = torch.arange(channels)
    shape = [_size(size) for size in before.shape]
    args = map_arg(node.args[1:], lambda n: _size(n.meta.get("val", 0)))
    kwargs = map_arg(node.kwargs, lambda n: _size(n.meta.get("val", 0)))
    assert callable(node.target)
    assert isinstance(args, tuple)
    assert isinstance(kwargs, dict)
    moved = node.target(numbers.expand(shape).contiguous(), *args, **kwargs)
    return moved.shape[-1:] == (channels,) and bool((moved == numbers).all())


def _size(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else _torch_compat.symbol_hint(size)


def _can_take_factors(producer: Node, readers: Readers) -> bool:
    """Whether it is a layer norm over one dimension, or a linear, with parameters of its own."""
    if producer.op != "call_function":
        return False
    if producer.target not in {aten.layer_norm.default, aten.linear.default}:
        return False
    arguments = arguments_of(producer)
    if len(arguments.get("normalized_shape", [0])) != 1:
        return False
    constants = {name: constant_of(arguments[name]) for name in ("weight", "bias")}
    if constants["weight"] is None or (constants["bias"] is None and arguments["bias"] is not None):
        return False
    values = [value for value in constants.values() if value is not None]
    return all(readers[_memory(value)] == frozenset({producer}) for value in values)


def _kernel_before(source: Node) -> str:
    """The layer that ``source`` is the result of, together with what its kernel computes next."""
    node = source
    while node.op == "call_function" and (node.target in _ON_THE_WAY or is_view_like(node)):
        node = node.all_input_nodes[0]
        if only_user(node) is None:
            return ""
    kind = FLOAT_LAYERS.get(node.target, "") if node.op == "call_function" else ""
    return kind if kind in LINEAR_AND_CONV else ""


def _readers_of_constants(exported: GraphModule) -> Readers:
    """Memory of a constant -> what reads it, under whichever of its names."""
    found: dict[int, list[Node]] = defaultdict(list)
    for node in exported.graph.find_nodes(op="get_attr"):
        value = constant_of(node)
        if value is not None:
            found[_memory(value)] += node.users
    return {memory: frozenset(nodes) for memory, nodes in found.items()}


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
