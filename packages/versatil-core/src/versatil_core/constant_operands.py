"""Computes once what a graph would compute from parameters at every call: a slice, a transpose, a weight norm.

Attention modules cut one packed weight in three, and parametrizations compute their weight anew each time. A layer
can be quantized only where its weight is a constant of the model, and lowered only where its bias is one.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from versatil_core.parameter_names import add_constant, free_name, remove_constant
from versatil_passes.graph_queries import constant_of, is_mutating, is_written, node_order, value_of


def fold_constants(module: GraphModule, operands: Iterable[Node]) -> None:
    """Replace what depends on nothing but parameters and unwritten buffers by a parameter.

    Equal computations become one parameter. It has the name of the first one that went into it, with a number at its
    end where something else still reads that one. What comes out as a parameter is, such as a transpose of a
    transpose, becomes that parameter.

    Args:
        module: An exported module; changed in place.
        operands: Nodes of its graph. Those that depend on an input stay as they are.
    """
    order = node_order(module.graph)
    groups: dict[str, list[_Computation]] = {}
    for node in sorted(set(operands), key=order.__getitem__):
        if node.op != "get_attr" and is_constant(node):
            computation = _Computation(sorted(_upstream(node), key=order.__getitem__))
            groups.setdefault(computation.key, []).append(computation)
    equal_ones = [*groups.values()]
    values = [equal[0].value() for equal in equal_ones]
    done = {node for equal in equal_ones for each in equal for node in each.nodes}
    constants = [_replaced(*each) for each in zip(equal_ones, values, strict=True)]
    for node in sorted(done, key=order.__getitem__, reverse=True):
        if not node.users:
            module.graph.erase_node(node)
    new = {node: value for node, value in zip(constants, values, strict=True) if node not in done}
    _add_parameters(module, new, {str(node.target) for node in done if node.op == "get_attr"})
    module.recompile()


def is_constant(node: Node) -> bool:
    """Whether a node depends on nothing but parameters and buffers that the graph does not write to."""
    return all(map(_is_repeatable, _upstream(node)))


@dataclass(frozen=True)
class _Computation:
    """Nodes in running order, the last of which is the result."""

    nodes: Sequence[Node]

    @property
    def key(self) -> str:
        """Equal for computations of the same from the same."""
        names = {
            node: f"%{node.target if node.op == 'get_attr' else index}"
            for index, node in enumerate(self.nodes)
        }
        return repr(
            [(node.target, map_arg((node.args, node.kwargs), names.get)) for node in self.nodes]
        )

    @property
    def leaves(self) -> list[Node]:
        """The parameters that go into it."""
        return [node for node in self.nodes if node.op == "get_attr"]

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """Compute it."""
        values: dict[Node, Any] = {}
        for node in self.nodes:
            target: Any = node.target
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            is_leaf = node.op == "get_attr"
            values[node] = constant_of(node) if is_leaf else target(*args, **kwargs)
        result: torch.Tensor = values[self.nodes[-1]]
        return result


def _replaced(equal: Sequence[_Computation], value: torch.Tensor) -> Node:
    """Give all readers of equal computations one constant: a parameter that has the value, or a new node."""
    leaves, result = equal[0].leaves, equal[0].nodes[-1]
    constant = next((leaf for leaf in leaves if _is_same(constant_of(leaf), value)), None)
    if constant is None:
        with result.graph.inserting_before(result):
            constant = result.graph.get_attr(str(leaves[0].target))
        fake = value_of(result)
        if fake is not None:
            constant.meta["val"] = fake.contiguous()
    for computation in equal:
        computation.nodes[-1].replace_all_uses_with(constant)
    return constant


def _add_parameters(
    module: GraphModule, new: Mapping[Node, torch.Tensor], sources: set[str]
) -> None:
    """Remove the sources that nothing reads any more, and give new constants their values and names."""
    read = {str(leaf.target) for leaf in module.graph.find_nodes(op="get_attr") if leaf not in new}
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    for source in sources - read:
        remove_constant(module, source)
    for constant, value in new.items():
        source = str(constant.target)
        own = torch.nn.Parameter(value.contiguous().clone(), requires_grad=source in trained)
        constant.target = free_name(module, source)
        add_constant(module, constant.target, own)


def _upstream(node: Node) -> Iterator[Node]:
    """The node and all that it depends on, each once; a node comes before what it depends on."""
    seen, pending = set(), [node]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending.extend(node.all_input_nodes)


def _is_repeatable(node: Node) -> bool:
    """Whether a node is a constant, or gives the same whenever its arguments are the same."""
    if node.op == "get_attr":
        return constant_of(node) is not None and not is_written(node)
    if node.op != "call_function" or is_mutating(node) or any(map(is_mutating, node.users)):
        return False
    return node.target is operator.getitem or (
        isinstance(node.target, torch._ops.OpOverload)
        and bool(node.all_input_nodes)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _is_same(parameter: torch.Tensor | None, value: torch.Tensor) -> bool:
    return (
        parameter is not None
        and parameter.data_ptr() == value.data_ptr()
        and parameter.shape == value.shape
        and parameter.stride() == value.stride()
    )
