"""Annotates exactly what the targets select, whichever quantizers their backends have."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)

from versatil_core.activation_observers import OBSERVERS
from versatil_core.annotations import ANNOTATION
from versatil_core.errors import CalibrationError, NothingQuantizedError
from versatil_core.module_scope import is_node_inside, is_node_selected
from versatil_core.targets import QuantizationTarget
from versatil_passes.float_layers import FLOAT_LAYERS

_LOOKED_FOR = ("linear", "conv1d", "conv2d", "conv3d", "embedding", "embedding_bag")


def target_quantizer(
    targets: Sequence[QuantizationTarget], observers: Mapping[str, str] = MappingProxyType({})
) -> Quantizer:
    """Return one quantizer for all targets.

    Args:
        targets: They don't overlap.
        observers: Module path -> name of the observer of the activations in there.
    """
    quantizers = [_quantizer(target) for target in targets]
    quantizer = quantizers[0] if len(quantizers) == 1 else ComposableQuantizer(quantizers)
    return ObservingQuantizer(quantizer, observers) if observers else quantizer


def _quantizer(target: QuantizationTarget) -> Quantizer:
    if target.is_whole_module:
        return target.backend.create_quantizer(target.module_path)
    return SelectingQuantizer(target)


class _WrappingQuantizer(Quantizer):
    """Annotates by another quantizer; a subclass does something around it."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self._quantizer = quantizer

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Do what the other quantizer does."""
        return self._quantizer.transform_for_annotation(model)

    def validate(self, model: GraphModule) -> None:
        """Do what the other quantizer does."""
        self._quantizer.validate(model)


class SelectingQuantizer(_WrappingQuantizer):
    """Lets a backend's quantizer see only what a target selects.

    Args:
        target: Whose backend's quantizer annotates.
    """

    def __init__(self, target: QuantizationTarget) -> None:
        super().__init__(target.backend.create_quantizer())
        self._target = target

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate what the target selects, in place; all other nodes stay as they were."""
        others = [node for node in model.graph.nodes if not is_node_selected(node, self._target)]
        before = {node: node.meta.get(ANNOTATION) for node in others}
        for node in others:
            # A quantizer leaves alone what is annotated, and does not count on it to be int8.
            node.meta.setdefault(ANNOTATION, QuantizationAnnotation(_annotated=True))
        model = self._quantizer.annotate(model)
        for node, annotation in before.items():
            node.meta.pop(ANNOTATION, None)
            if annotation is not None:
                node.meta[ANNOTATION] = annotation
        return model


class ObservingQuantizer(_WrappingQuantizer):
    """Annotates as another quantizer does, but with chosen observers of activations.

    Args:
        quantizer: It annotates.
        observers: Module path or pattern -> name of an observer; of two that match, the later one.
    """

    def __init__(self, quantizer: Quantizer, observers: Mapping[str, str]) -> None:
        super().__init__(quantizer)
        self._observers = observers

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate, in place.

        Raises:
            CalibrationError: A path holds nothing that an observer could choose a range for.
        """
        model = self._quantizer.annotate(model)
        annotated = [node for node in model.graph.nodes if _is_annotated(node)]
        for path, name in self._observers.items():
            inside = [node for node in annotated if is_node_inside(node, path)]
            if not sum(_observe(node, OBSERVERS[name]) for node in inside):
                raise CalibrationError(
                    f"the observer {name!r} has nothing to do in {path or 'the model'!r}: no "
                    f"activation there gets a fixed range. Choose a module that is quantized "
                    f"statically"
                )
        return model


def _observe(node: Node, observer: Any) -> bool:
    """Give the activations of an annotated node another observer; say whether there is one."""
    annotation = node.meta[ANNOTATION]
    specs = dict(annotation.input_qspec_map)
    fixed = [
        source
        for source, spec in specs.items()
        if source.op != "get_attr" and isinstance(spec, QuantizationSpec) and not spec.is_dynamic
    ]
    for source in fixed:
        specs[source] = replace(specs[source], observer_or_fake_quant_ctr=observer)
    node.meta[ANNOTATION] = replace(annotation, input_qspec_map=specs)
    return bool(fixed)


def give_own_constants(exported: GraphModule, target: QuantizationTarget) -> None:
    """Let the nodes of a target read shared weights by nodes of their own, in place.

    torchao observes a node once, for all its readers: by the recipe of whichever target comes first.

    Args:
        exported: What is going to be prepared.
        target: One of several.
    """
    for shared in exported.graph.find_nodes(op="get_attr"):
        inside = [user for user in shared.users if is_node_selected(user, target)]
        if not inside or len(inside) == len(shared.users):
            continue
        with exported.graph.inserting_after(shared):
            own = exported.graph.get_attr(str(shared.target))
        own.meta = dict(shared.meta)
        for user in inside:
            user.replace_input_with(shared, own)
    exported.recompile()


def check_something_annotated(prepared: GraphModule, target: QuantizationTarget) -> None:
    """Check that a target is not empty.

    Args:
        prepared: What ``prepare_pt2e`` returned.
        target: One that was annotated.

    Raises:
        NothingQuantizedError: Nothing in it is annotated, or no operator of a kind it asks for.
    """
    any_operator = replace(target, operators=())
    nodes = [
        node
        for node in prepared.graph.nodes
        if node.op == "call_function" and is_node_selected(node, any_operator)
    ]
    annotated = {FLOAT_LAYERS.get(node.target, "") for node in nodes if _is_annotated(node)}
    missing = tuple(name for name in target.operators if name not in annotated)
    if annotated and not missing:
        return
    looked_for = missing or _LOOKED_FOR
    found = sorted({str(node.target) for node in nodes if node.target is not operator.getitem})
    where = repr(target.module_path) if target.module_path else "the model"
    raise NothingQuantizedError(
        f"nothing to quantize in {where}: looked for {', '.join(looked_for)} with a weight of the "
        f"model, found {', '.join(found) or 'no operator at all'}. Choose a module that runs such "
        f"layers",
        module_path=target.module_path,
        looked_for=looked_for,
        found=found,
    )


def _is_annotated(node: Node) -> bool:
    annotation = node.meta.get(ANNOTATION)
    return annotation is not None and any(
        spec is not None for spec in annotation.input_qspec_map.values()
    )
