"""Where the error of a quantized model comes from: what each layer adds, and what has come together.

The reference is walked twice with each batch, next to the float model:

- *accumulated*: each runs on its own. The difference at a layer is all the error up to there.
- *introduced*: each node of the reference is fed the float model's values, through the
  reference's own quantize and dequantize. The difference at a layer is the error that the
  rounding of its input and of its weights makes, and no other.

Both are SQNR, over all batches together. torchao's numeric debugger compares the values of two
models, each running on its own: that is the first of the two only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from versatil_core.activation_ranges import RangeRecorder
from versatil_core.equalization import scaled_nodes
from versatil_core.export import ModelInputs
from versatil_core.float_graph import float_graph, matching_nodes
from versatil_core.kept_buffers import KeptBuffers
from versatil_core.layer_report import ActivationRange
from versatil_core.recorded_values import ValueRecorder, copies_of, shares_memory
from versatil_core.reference_info import find_reference_info
from versatil_core.signal_to_noise import Energies, energies


@dataclass(frozen=True)
class NodeErrors:
    """Error energies of one node; ``.db`` of each is its SQNR."""

    introduced: Energies
    accumulated: Energies


@dataclass(frozen=True)
class GraphErrors:
    """What walking the reference next to the float model showed.

    Attributes:
        nodes: Node of the reference -> its errors, in graph order; those with a float result
            and a counterpart in the float model.
        ranges: The activations with fixed scales.
    """

    nodes: Mapping[str, NodeErrors]
    ranges: tuple[ActivationRange, ...]


def graph_errors(
    float_model: torch.nn.Module,
    reference: GraphModule,
    calls: Sequence[ModelInputs],
    *,
    before_run: Callable[[], None] | None = None,
    on_batch: Callable[[], None] | None = None,
) -> GraphErrors:
    """Walk the reference next to the float model.

    Args:
        float_model: The model that the reference was made of.
        reference: From :func:`versatil_core.quantize` or :func:`versatil_core.load`.
        calls: Inputs of both, at least one, in the structure that the reference was exported with.
        before_run: Called before each run, to put state back.
        on_batch: Called after each batch, for a progress bar.

    Raises:
        ExportError: torch cannot capture the float model with these inputs.
    """
    of_float = float_graph(float_model, reference, calls[0])
    info = find_reference_info(reference)
    scaled = scaled_nodes(reference, () if info is None else info.equalized)
    matches = {
        ours: theirs
        for ours, theirs in matching_nodes(reference, of_float).items()
        if ours not in scaled
    }
    recorder = RangeRecorder(reference)
    state = KeptBuffers(of_float)
    totals: dict[str, _Total] = {}
    for call in calls:
        with torch.no_grad():
            state.restore()
            wanted = _values(of_float, call)
            expected = {
                ours: wanted[theirs] for ours, theirs in matches.items() if theirs in wanted
            }
            if before_run is not None:
                before_run()
            own = _values(reference, call)
            for name in _comparable(own, expected):
                energy = energies(own[name], expected[name])
                _add(totals.setdefault(name, _Total()), "accumulated", energy)
            del own
            if before_run is not None:
                before_run()
            fed = _FedRun(reference, expected, recorder)
            fed.run(*copies_of(call.leaves))
            for name, energy in fed.introduced.items():
                _add(totals.setdefault(name, _Total()), "introduced", energy)
        if on_batch is not None:
            on_batch()
    nodes = {
        name: NodeErrors(total.introduced, total.accumulated)
        for name, total in totals.items()
        # Sizes that depend on values may differ between the two, so that one can't be compared.
        if total.introduced is not None and total.accumulated is not None
    }
    return GraphErrors(nodes, recorder.ranges())


@dataclass
class _Total:
    introduced: Energies | None = None
    accumulated: Energies | None = None


class _FedRun(Interpreter):
    """Runs the reference on the float model's values: compares each result, then replaces it."""

    def __init__(
        self, reference: GraphModule, expected: Mapping[str, Any], ranges: RangeRecorder
    ) -> None:
        super().__init__(reference)
        self._expected = expected
        self._ranges = ranges
        self.introduced: dict[str, Energies] = {}

    def run_node(self, n: Node) -> Any:
        if self._ranges.watches(n):
            source = n.all_input_nodes[0]
            self._ranges.observe(n, self.env[source])
        value = super().run_node(n)
        if not _is_comparable(value, self._expected.get(n.name)):
            return value
        expected = self._expected[n.name]
        self.introduced[n.name] = energies(value, expected)
        # What is written to through a view must stay one memory.
        return value if shares_memory(n) else expected


def _values(module: GraphModule, call: ModelInputs) -> dict[str, Any]:
    recorder = ValueRecorder(module)
    recorder.run(*copies_of(call.leaves))
    return recorder.values


def _add(total: _Total, what: str, energy: Energies) -> None:
    setattr(total, what, (getattr(total, what) or Energies()) + energy)


def _comparable(own: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterable[str]:
    return [name for name in own if _is_comparable(own[name], expected.get(name))]


def _is_comparable(value: Any, expected: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and isinstance(expected, torch.Tensor)
        and value.is_floating_point()
        and value.shape == expected.shape
        and value.dtype == expected.dtype
    )
