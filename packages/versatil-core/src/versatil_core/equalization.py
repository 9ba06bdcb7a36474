"""Moves outliers from activations into weights, before a transformer is quantized.

A few channels of a transformer's activations are many times larger than the others (Dettmers et
al., "LLM.int8()", 2022, section 4), and an int8 activation has one scale for all of them. Its
channels are divided by factors, and the weights that read them are multiplied by the same:
:mod:`versatil_core.equalization_search` chooses these. Here they are put into the graph:

- into the layer norm or the linear layer that makes the activation, if all that it makes is read
  by these layers: that costs nothing;
- otherwise as a multiply before the layers, if that pays.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from versatil_core.equalization_groups import LinearGroup, linear_groups, weight_of
from versatil_core.equalization_search import (
    Found,
    GroupSimulation,
    InputRecorder,
    Rows,
    factors_of,
    rounds_outputs_alike,
    search,
)
from versatil_core.export import ModelInputs
from versatil_core.kept_buffers import KeptBuffers
from versatil_core.reference_info import EqualizedLayers
from versatil_passes.float_layers import FLOAT_LAYERS
from versatil_passes.graph_queries import arguments_of, module_path_of

aten = torch.ops.aten

MAX_BATCHES = 8
"""The search looks at no more: it keeps what the layers read."""
MIN_GAIN_DB = 0.5
"""Less is chance, for a change that costs no time."""
MIN_GAIN_OF_MULTIPLY_DB = 4.0
"""For a multiply that keeps a linear kernel from writing int8 itself, and so takes a loop of its own:
one such loop takes 0.4 % of the time of MiniLM."""


@dataclass(frozen=True)
class Decision:
    """What is done with one group.

    Attributes:
        group: The layers.
        factors: What their input is divided by, float ``[in_features]``; None to leave them alone.
        producer: What takes the factors; None for a multiply.
        summary: The same for people and files.
    """

    group: LinearGroup
    factors: torch.Tensor | None
    producer: Node | None
    summary: EqualizedLayers


def decide(
    exported: GraphModule,
    prepared: GraphModule,
    calls: Sequence[ModelInputs],
    *,
    on_group: Callable[[], None] | None = None,
) -> tuple[Decision, ...]:
    """Choose the factors of each group of linear layers, and where to put them.

    Args:
        exported: From :func:`versatil_core.export.export`; run here, and not changed.
        prepared: The same model with observers.
        calls: Calibration data, at least one batch, that fits the model; the first ``MAX_BATCHES``
            are used.
        on_group: Called after each group, for a progress bar.

    Returns:
        One decision for each group, in the order of the graph.
    """
    groups = linear_groups(exported)
    recorder = InputRecorder(exported, [group for group in groups if not group.fault])
    state = KeptBuffers(exported)
    decisions = []
    with torch.no_grad():
        for call in calls[:MAX_BATCHES]:
            recorder.record(call)
        state.restore()
        for group in groups:
            decisions.append(_decide(group, prepared, recorder.rows.pop(group.source, [])))
            if on_group is not None:
                on_group()
    return tuple(decisions)


def apply_in_place(exported: GraphModule, decisions: Iterable[Decision]) -> None:
    """Divide the layers' inputs by their factors, and multiply their weights.

    The factors are powers of two, so that the module computes the same as before, to the last bit
    unless a value leaves the range of its dtype.

    Args:
        exported: What the decisions were made for; its parameters are replaced, not written to.
        decisions: From :func:`decide`.
    """
    for decision in decisions:
        if decision.factors is None:
            continue
        for target in dict.fromkeys(str(_weight(layer).target) for layer in decision.group.layers):
            _scale(exported, target, decision.factors)
        if decision.producer is None:
            _insert_multiply(exported, decision.group, 1 / decision.factors)
        else:
            _fold(exported, decision.producer, 1 / decision.factors)
    exported.recompile()


def scaled_nodes(module: GraphModule, equalized: Iterable[EqualizedLayers]) -> frozenset[str]:
    """Find the nodes whose values are not the float model's, but those divided by factors.

    Args:
        module: A reference.
        equalized: What its information says.

    Returns:
        Names of what took the factors and of what follows, up to the next layers.
    """
    folded = {layers.folded_into for layers in equalized if layers.folded_into}
    found: set[Node] = set()
    for node in module.graph.nodes:
        is_layer = node.target in FLOAT_LAYERS
        can_hold_factors = is_layer or node.target is aten.layer_norm.default
        takes_them = can_hold_factors and module_path_of(node) in folded
        if takes_them or (not is_layer and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return frozenset(node.name for node in found)


def _decide(group: LinearGroup, prepared: GraphModule, rows: Rows) -> Decision:
    simulation = None if group.fault else GroupSimulation(group, prepared)
    fault = group.fault if simulation is None else simulation.fault
    if not fault and sum(map(len, rows)) < 2:
        fault = "the calibration data has less than two rows for it"
    if simulation is None or fault:
        return _left_alone(group, Found(None, 0.0), fault)
    producer = group.producer
    if producer is not None and not rounds_outputs_alike(prepared, producer):
        producer = None
    if producer is None and group.kernel_before.startswith("conv"):
        return _left_alone(group, Found(None, 0.0), "its input comes out of a convolution")
    found = search(simulation, rows)
    is_costly = producer is None and bool(group.kernel_before) and not simulation.is_dynamic
    least = MIN_GAIN_OF_MULTIPLY_DB if is_costly else MIN_GAIN_DB
    if found.alpha is None or found.gain_db < least:
        return _left_alone(group, found, _too_little(found, least, is_costly=is_costly))
    factors = factors_of(rows, simulation.weights, found.alpha)
    return Decision(group, factors, producer, _summary(group, found, producer))


def _too_little(found: Found, least: float, *, is_costly: bool) -> str:
    if found.alpha is None:
        return "no factors make the error of its outputs less"
    what = ", the least for a multiply behind an int8 kernel" if is_costly else ""
    return f"factors would gain less than {least:g} dB{what}"


def _left_alone(group: LinearGroup, found: Found, reason: str) -> Decision:
    summary = EqualizedLayers(_paths(group), None, "", "", max(found.gain_db, 0.0), reason)
    return Decision(group, None, None, summary)


def _summary(group: LinearGroup, found: Found, producer: Node | None) -> EqualizedLayers:
    place = "multiply"
    if producer is not None:
        place = "linear" if producer.target is aten.linear.default else "layer norm"
    folded_into = "" if producer is None else _path(producer)
    return EqualizedLayers(_paths(group), found.alpha, place, folded_into, found.gain_db, "")


def _paths(group: LinearGroup) -> tuple[str, ...]:
    return tuple(_path(layer) for layer in group.layers)


def _path(node: Node) -> str:
    return module_path_of(node) or node.name


def _weight(layer: Node) -> Node:
    weight = layer.args[1]
    assert isinstance(weight, Node)
    return weight


def _fold(exported: GraphModule, producer: Node, shares: torch.Tensor) -> None:
    """Multiply what a layer norm or a linear layer returns, by its parameters."""
    arguments = arguments_of(producer)
    for name in ("weight", "bias"):
        constant = arguments[name]
        if isinstance(constant, Node):
            is_matrix = name == "weight" and producer.target is aten.linear.default
            _scale(exported, str(constant.target), shares[:, None] if is_matrix else shares)


def _scale(exported: GraphModule, target: str, factors: torch.Tensor) -> None:
    folder, _, name = target.rpartition(".")
    owner = exported.get_submodule(folder)
    value = getattr(owner, name)
    scaled = value.detach() * factors.to(value.dtype)
    if isinstance(value, torch.nn.Parameter):
        scaled = torch.nn.Parameter(scaled, value.requires_grad)
    setattr(owner, name, scaled)


def _insert_multiply(exported: GraphModule, group: LinearGroup, shares: torch.Tensor) -> None:
    first = group.layers[0]
    folder, _, name = str(_weight(first).target).rpartition(".")
    attribute = f"{name}_input_factors"
    shares = shares.to(weight_of(first).dtype)
    exported.get_submodule(folder).register_buffer(attribute, shares)
    with exported.graph.inserting_before(first):
        constant = exported.graph.get_attr(f"{folder}.{attribute}" if folder else attribute)
        scaled = exported.graph.call_function(aten.mul.Tensor, (group.source, constant))
    fake = group.source.meta["val"]
    constant.meta = {"val": fake.new_empty(shares.shape)}
    scaled.meta = {**first.meta, "val": fake}
    for layer in group.layers:
        layer.replace_input_with(group.source, scaled)
