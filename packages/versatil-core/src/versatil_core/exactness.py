"""The judge of numerics: does each int8 op give what the quantize/dequantize reference defines?

Every op is fed the reference's own inputs, so that errors cannot add up or hide behind one another.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from versatil_core._torch_compat import (
    copy_graph_module,
    flatten_inputs,
    in_call_order,
    tree_leaves,
    unflatten_like,
)
from versatil_core.compile import CompiledModel
from versatil_core.errors import LoweringError
from versatil_core.exactness_report import ExactnessReport, OpExactness
from versatil_core.export import model_inputs
from versatil_core.kept_buffers import KeptBuffers
from versatil_core.lower import is_lowered, lowered_copy, moving_passes
from versatil_core.recorded_values import ValueRecorder, copies_of, shares_memory
from versatil_core.signal_to_noise import is_equal, sqnr_db, tree_energies
from versatil_passes import PassChain
from versatil_passes.graph_queries import is_mutating
from versatil_passes.int8_chain import is_dequantize


def check_exactness(
    reference: GraphModule,
    candidate: torch.nn.Module,
    inputs: Any,
    *,
    float_model: torch.nn.Module | None = None,
) -> ExactnessReport:
    """Compare a lowered or compiled model with its reference, op by op.

    The reference runs eagerly and its values are kept. A lowered graph is walked with them. Of a compiled model, each
    op is compiled on its own, by the same backend, with the reference's values as its inputs.

    Args:
        reference: What :func:`versatil_core.quantize` or :func:`versatil_core.load` returned.
        candidate: What :func:`versatil_core.lower` or :func:`versatil_core.compile` made of it.
        inputs: Inputs of the model: a tensor, a tuple of inputs, or a mapping of inputs by name.
        float_model: The model before quantization, to measure how much farther from it the candidate is.

    Returns:
        The comparison of each op and of the whole.

    Raises:
        TypeError: ``candidate`` is neither lowered nor compiled.
        LoweringError: ``candidate`` was compiled from another reference.

    Example:
        >>> import torch
        >>> from versatil_core import lower, quantize
        >>> from versatil_x86 import X86InductorBackend
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(8, 4)), torch.randn(2, 8)
        >>> backend = X86InductorBackend(reduce_range=True)
        >>> reference = quantize(model, (x,), backend, calibration=[x])
        >>> check_exactness(reference, lower(reference, backend), (x,)).is_exact
        True
    """
    # A model may write to its inputs.
    call = model_inputs(inputs)
    named = in_call_order(reference, call.kwargs)
    # A graph is interpreted with its inputs one after another.
    leaves = flatten_inputs(call.args, named)
    reference_inputs = copies_of(leaves)
    args, kwargs = unflatten_like(copies_of(leaves), call.args, named)
    with torch.no_grad():
        lifted = copy_graph_module(reference)
        PassChain(*moving_passes())(lifted.graph)
        state = KeptBuffers(reference)  # and of the candidate, which shares them
        recorder = ValueRecorder(lifted)
        expected = recorder.run(*reference_inputs)
        state.keep_changed()
        state.restore()
        if is_lowered(candidate):
            assert isinstance(candidate, GraphModule)
            ops = tuple(_walk(candidate, recorder.values, copies_of(leaves), expected))
        elif isinstance(candidate, CompiledModel):
            if candidate.reference is not reference:
                raise LoweringError(
                    "the candidate was compiled from another reference: check it against candidate.reference"
                )
            ops = tuple(_check_pieces(lifted, candidate, recorder.values))
        else:
            raise TypeError(
                f"candidate must come from lower() or compile(), not be a {type(candidate).__name__}"
            )
        state.restore()
        result = candidate(*args, **kwargs)
        state.restore()
        loss_db = None
        if float_model is not None:
            own_args, own_kwargs = unflatten_like(copies_of(leaves), call.args, named)
            wanted = float_model(*own_args, **own_kwargs)
            loss = tree_energies(expected, wanted).db - tree_energies(result, wanted).db
            # Both equal, as without any float result, or both infinitely far.
            loss_db = None if math.isnan(loss) else loss
    untouched = all(
        is_equal(old, new)
        for old, new in zip(reference_inputs, flatten_inputs(args, kwargs), strict=True)
    )
    return ExactnessReport(ops, tree_energies(result, expected).db, untouched, loss_db)


class _Walker(Interpreter):
    """Runs a lowered graph; each value that the reference also has is compared, and then replaced by it."""

    def __init__(self, module: GraphModule, values: Mapping[str, Any]) -> None:
        super().__init__(module)
        self.values = values
        self.ops: list[OpExactness] = []

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        name = n.meta.get("replaces", n.name)
        # Its own constants: one that differs from the reference's is a fault to find.
        if name not in self.values or n.op in {"output", "get_attr"}:
            return value
        expected = self.values[name]
        if n.op == "call_function" and isinstance(value, torch.Tensor):
            operator = n.meta.get("lowered_as", str(n.target))
            self.ops.append(_compare(name, operator, value, expected))
        return value if shares_memory(n) else expected


def _walk(
    lowered: GraphModule, values: Mapping[str, Any], inputs: Sequence[Any], expected: Any
) -> Iterator[OpExactness]:
    walker = _Walker(lowered, values)
    results = tree_leaves(walker.run(*inputs))
    yield from walker.ops
    # Ops that agree may still be wired to the results in a wrong way.
    for result, wanted in zip(results, tree_leaves(expected), strict=True):
        if isinstance(wanted, torch.Tensor):
            yield _compare("output", "output", result, wanted)


def _check_pieces(
    lifted: GraphModule, compiled: CompiledModel, values: Mapping[str, Any]
) -> Iterator[OpExactness]:
    lowered, _ = lowered_copy(lifted, compiled.backend.lowering_rules)
    lowered_as = {
        node.meta["replaces"]: node.meta["lowered_as"]
        for node in lowered.graph.nodes
        if "replaces" in node.meta
    }
    survivors = {node.name for node in lowered.graph.nodes}
    pieces = _Pieces(lifted, values)
    names = [
        node.name
        for node in lifted.graph.nodes
        if node.op == "call_function"
        and (node.name in lowered_as or node.name in survivors)
        and not is_dequantize(node)
        and isinstance(values[node.name], torch.Tensor)
    ]
    module = pieces.module_of(names)
    # Not by compile(): the dtypes of the reference's floats are decided already.
    results = CompiledModel(module, compiled.backend, dynamic=False)(*pieces.inputs)
    for name, result in zip(names, results, strict=True):
        operator = lowered_as.get(name, str(pieces.node(name).target))
        yield _compare(name, operator, result, values[name])


class _Pieces:
    """Cuts a graph into independent ops whose inputs are values of an earlier run."""

    def __init__(self, lifted: GraphModule, values: Mapping[str, Any]) -> None:
        self._lifted = lifted
        self._values = values
        self._nodes = {node.name: node for node in lifted.graph.nodes}
        self.inputs: list[Any] = []

    def node(self, name: str) -> Node:
        return self._nodes[name]

    def module_of(self, names: Sequence[str]) -> GraphModule:
        """A module that computes each named node by itself; call it with :attr:`inputs`."""
        graph = Graph()
        placeholders: dict[str, Node] = {}
        ends = set(names)
        results = [
            self._copy(graph, self._nodes[name], ends - {name}, placeholders) for name in names
        ]
        graph.output(tuple(results))
        return GraphModule(self._lifted, graph)

    def _copy(self, graph: Graph, node: Node, ends: set[str], placeholders: dict[str, Node]) -> Any:
        value = self._values[node.name]
        if node.op == "get_attr":
            return graph.get_attr(str(node.target))
        is_boundary = node.op == "placeholder" or node.name in ends
        if is_boundary and isinstance(value, torch.Tensor):
            return self._placeholder(graph, node, placeholders)
        if not isinstance(value, (torch.Tensor, tuple, list)):
            return value  # a size or a flag: part of the op
        copies = {
            argument: self._copy(graph, argument, ends, placeholders)
            for argument in node.all_input_nodes
        }
        if is_mutating(node):  # the placeholder has other readers
            copies = {
                old: graph.call_function(torch.ops.aten.clone.default, (new,))
                for old, new in copies.items()
            }
        return graph.node_copy(node, copies.__getitem__)

    def _placeholder(self, graph: Graph, node: Node, placeholders: dict[str, Node]) -> Node:
        if node.name not in placeholders:
            first = next(iter(graph.nodes), None)
            with graph.inserting_before(first) if first is not None else graph.inserting_after():
                placeholders[node.name] = graph.placeholder(node.name)
            placeholders[node.name].meta["val"] = self._values[node.name]
            self.inputs.insert(0, self._values[node.name])
        return placeholders[node.name]


def _compare(node: str, op: str, result: torch.Tensor, expected: torch.Tensor) -> OpExactness:
    if expected.is_complex() and result.is_complex():
        result, expected = torch.view_as_real(result), torch.view_as_real(expected)
    dtype = expected.dtype
    if result.shape != expected.shape or result.dtype != dtype:
        return OpExactness(
            node,
            f"{op} (returned {result.dtype} {tuple(result.shape)})",
            dtype,
            -math.inf,
            None,
            None,
        )
    if dtype.is_floating_point:
        return OpExactness(node, op, dtype, sqnr_db(result, expected), None, None)
    steps = (result.long() - expected.long()).abs()
    share = (steps != 0).double().mean().item() if steps.numel() else 0.0
    return OpExactness(node, op, dtype, None, int(steps.max()) if steps.numel() else 0, share)
