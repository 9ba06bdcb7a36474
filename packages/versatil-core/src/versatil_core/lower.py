"""Turn a reference into a graph of int8 operators that runs eagerly."""

import platform
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule

from versatil_core._torch_compat import copy_graph_module
from versatil_core.backend import BasePT2EBackend
from versatil_core.convert import drop_unused_state
from versatil_core.errors import LoweringError, UnsupportedHostError
from versatil_core.export import tracing
from versatil_core.float_dtype import as_compiled
from versatil_core.saturation import warn_about_saturation
from versatil_core.versions import check_versions
from versatil_passes import (
    Int8Lowering,
    KeepInt8,
    LoweringRecord,
    LoweringRules,
    PassChain,
    QuantizeLayerOutputs,
    QuantLiftUp,
)
from versatil_passes.commuting_ops import let_pools_run_eagerly
from versatil_passes.pass_chain import GraphPass

_RECORD = "versatil_lowering"


class LoweredModule(GraphModule):
    """A graph of int8 operators whose weights are packed for the kernels of this machine.

    ``copy.deepcopy`` shares the packed weights, which nothing can change. ``train()`` and ``eval()`` change nothing:
    the model was captured in eval mode.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        # torch cannot copy them.
        memo.update({id(value): value for value in self.buffers() if value.is_mkldnn})
        copied: GraphModule = super().__deepcopy__(memo)
        return copied

    def __reduce__(self) -> NoReturn:
        raise LoweringError(
            "a lowered module holds weights that are packed for this machine and cannot be pickled: save() the "
            "reference that it was lowered from, then load() and lower() it where it is needed"
        )


def lower(reference: GraphModule, backend: BasePT2EBackend) -> GraphModule:
    """Replace the quantize/dequantize islands of a reference by int8 kernels.

    The result runs without a compiler, on this kind of machine only: its weights are packed for its kernels. It is
    the fastest way to see what int8 computes; :func:`versatil_core.compile` makes the same kernels faster by fusing
    what is around them.

    Args:
        reference: What :func:`versatil_core.quantize` returned. It is not changed.
        backend: The hardware to lower for.

    Returns:
        A module with the reference's inputs and outputs. Its ``meta["versatil_lowering"]`` is the
        :class:`~versatil_passes.LoweringRecord` of what was lowered and what was declined.

    Raises:
        UnsupportedHostError: This machine does not have the backend's kernels.
        LoweringError: ``reference`` is no graph module, or is lowered already.
        AutocastError: Autocast is on, with another dtype than bfloat16.
    """
    check_versions()
    check_host(backend)
    reference = as_compiled(reference, backend)
    lowered, record = lowered_copy(reference, backend.lowering_rules)
    warn_about_saturation(record, backend.lowering_rules)
    with tracing:
        Int8Lowering(backend.lowering_rules).kernels(allow_in_place=False)(lowered.graph)
    let_pools_run_eagerly(lowered.graph)
    drop_unused_state(lowered)
    lowered.recompile()
    lowered.meta[_RECORD] = record
    return lowered


def lowered_copy(
    reference: GraphModule, rules: LoweringRules
) -> tuple[GraphModule, LoweringRecord]:
    """A copy with neutral int8 operators, not yet bound to kernels, and the record of how it came about.

    Works on every machine. Weights are shared with the reference.

    Raises:
        LoweringError: ``reference`` is no graph module, or is lowered already.
    """
    if not isinstance(reference, GraphModule):
        raise LoweringError(
            f"a reference is a torch.fx.GraphModule made by versatil_core.quantize, not a {type(reference).__name__}"
        )
    if is_lowered(reference):  # nothing is left in it to find
        raise LoweringError(
            "this module is lowered already: pass the reference that it was lowered from"
        )
    lowered = copy_graph_module(reference, LoweredModule)
    lowering = Int8Lowering(rules)
    with tracing:  # a pass that computes a value would be traced, too
        PassChain(*passes_in_front(rules), lowering)(lowered.graph)
    return lowered, lowering.record


def moving_passes() -> tuple[GraphPass, ...]:
    """The passes that only change where a reference quantizes; what they leave is a reference still."""
    return QuantLiftUp(), QuantizeLayerOutputs()


def passes_in_front(rules: LoweringRules) -> tuple[GraphPass, ...]:
    """The passes that run before the lowering, but for those that the rules leave out."""
    kept: tuple[GraphPass, ...] = () if "KeepInt8" in rules.without_passes else (KeepInt8(),)
    return *moving_passes(), *kept


def check_host(backend: BasePT2EBackend) -> None:
    """Refuse a backend whose kernels this machine does not have.

    Raises:
        UnsupportedHostError: ``platform.machine()`` is none of the backend's machine types.
    """
    machine = platform.machine().lower()
    machine_types = backend.lowering_rules.machine_types
    if machine not in machine_types:
        raise UnsupportedHostError(
            f"backend {backend.name!r} runs on {', '.join(machine_types)}; this machine is {machine}. Quantizing for "
            "it works here: save the reference, then load, lower and compile it there.",
            backend=backend.name,
            machine=machine,
            machine_types=machine_types,
        )


def is_lowered(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a result of :func:`lower`."""
    return isinstance(module, GraphModule) and _RECORD in module.meta


def lowering_record(module: torch.nn.Module) -> LoweringRecord:
    """Return what :func:`lower` did to make ``module``."""
    record = module.meta[_RECORD] if isinstance(module, GraphModule) else None
    assert isinstance(record, LoweringRecord)
    return record
