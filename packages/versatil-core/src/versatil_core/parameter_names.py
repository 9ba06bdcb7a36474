"""Gives the int8 weights of a reference the names that the weights had in the float model."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

# A layer's name in the graph, and which of its arguments: that is the same before and after conversion.
Place = tuple[str, int]


def weight_names(prepared: GraphModule) -> dict[Place, str]:
    """Find the parameters whose observed values the layers of a prepared model take.

    Args:
        prepared: A model with observers, before it is converted.

    Returns:
        Layer and argument -> dotted name of the parameter.
    """
    return {
        place: name
        for node in prepared.graph.nodes
        if node.op == "call_module" and (name := _source(node)) is not None
        for place in _places(node)
    }


def rename_weights(reference: GraphModule, names: Mapping[Place, str]) -> None:
    """Name each int8 weight as the float one was, and its scale and zero point after it.

    ``conv.weight`` comes with ``conv.weight_scale`` and ``conv.weight_zero_point``. A name that
    is taken, since something else still reads the float weight, gets a number at its end.

    Args:
        reference: A converted model without unused parameters; changed in place.
        names: From :func:`weight_names`.
    """
    named: set[str] = set()
    for weight in reference.graph.find_nodes(op="get_attr"):
        readers = [user for user in weight.users if user.args[0] is weight]
        if value_at(reference, str(weight.target)).is_floating_point():
            continue
        for dequantize, place in [(user, place) for user in readers for place in _places(user)]:
            if place in names and str(weight.target) not in named:
                _rename_weight(reference, dequantize, names[place])
                _rename_folded_bias(reference, place[0], names[place])
                named.add(str(weight.target))
    reference.recompile()


def _rename_weight(reference: GraphModule, dequantize: Node, name: str) -> None:
    suffixes = ("", "_scale", "_zero_point")
    for argument, suffix in zip(dequantize.args[:3], suffixes, strict=True):
        if isinstance(argument, Node) and argument.op == "get_attr":
            _rename(reference, argument, name + suffix)


def _rename_folded_bias(reference: GraphModule, layer: str, weight: str) -> None:
    """Undo torchao's name for the bias that a batch norm brings to a convolution without one."""
    [node] = [node for node in reference.graph.nodes if node.name == layer]
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and argument.target == f"{weight}_bias":
            _rename(reference, argument, f"{weight.removesuffix('weight')}bias")


def _rename(module: GraphModule, constant: Node, wanted: str) -> None:
    old = str(constant.target)
    if old == wanted:
        return
    value = value_at(module, old)
    new = free_name(module, wanted)
    remove_constant(module, old)
    add_constant(module, new, value)
    for reader in module.graph.find_nodes(op="get_attr"):
        if reader.target == old:
            reader.target = new


def remove_constant(module: GraphModule, name: str) -> None:
    """Delete a parameter or buffer, by its dotted name."""
    folder, _, attribute = name.rpartition(".")
    delattr(module.get_submodule(folder), attribute)


def add_constant(module: GraphModule, name: str, value: torch.Tensor) -> None:
    """Add a parameter, or a buffer if it is no ``torch.nn.Parameter``, under a dotted name."""
    folder, _, attribute = name.rpartition(".")
    if folder and not _has_submodule(module, folder):
        module.add_submodule(folder, torch.nn.Module())
    owner = module.get_submodule(folder)
    if isinstance(value, torch.nn.Parameter):
        owner.register_parameter(attribute, value)
    else:
        owner.register_buffer(attribute, value)


def free_name(module: GraphModule, wanted: str) -> str:
    """Return a dotted name that nothing in the module has, with a number at its end if need be."""
    taken = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    candidates = (wanted, *(f"{wanted}_{number}" for number in range(1, len(taken) + 2)))
    return next(
        name for name in candidates if name not in taken and not _has_attribute(module, name)
    )


def _source(observer: Node) -> str | None:
    """Return the parameter that an observer sees, perhaps transposed; None if it sees an activation."""
    node = observer
    while node.op in {"call_module", "call_function"} and len(node.all_input_nodes) == 1:
        [node] = node.all_input_nodes
    return str(node.target) if node.op == "get_attr" else None


def _places(node: Node) -> Iterator[Place]:
    for user in node.users:
        for index, argument in enumerate(user.args):
            if argument is node:
                yield user.name, index


def value_at(module: GraphModule, name: str) -> torch.Tensor:
    """Return a parameter or buffer, by its dotted name."""
    folder, _, attribute = name.rpartition(".")
    value: Any = getattr(module.get_submodule(folder), attribute)
    assert isinstance(value, torch.Tensor)
    return value


def _has_submodule(module: GraphModule, path: str) -> bool:
    return path in dict(module.named_modules())


def _has_attribute(module: GraphModule, name: str) -> bool:
    folder, _, attribute = name.rpartition(".")
    return _has_submodule(module, folder) and hasattr(module.get_submodule(folder), attribute)
