"""Warn when int8 kernels may saturate on the CPU at hand."""

import warnings

from torch.fx import Graph

from versatil_passes import Int8Lowering, LoweringRecord, LoweringRules


class SaturationWarning(UserWarning):
    """Kernels of this CPU may add products into a 16-bit value that saturates."""


_warned: set[tuple[tuple[str, int | None], ...]] = (
    set()
)  # the layers of each warning of this process


def warn_about_saturation(record: LoweringRecord, rules: LoweringRules) -> None:
    """Name the layers whose sums may saturate; once in a process for the same layers.

    Args:
        record: What was lowered, with the largest pair of weights of each layer.
        rules: The backend's rules; their ``saturating_pairs`` say what is the matter and what to do.
    """
    risky = [op for op in record.lowered if op.may_saturate]
    names = tuple(op.module_path or op.node for op in risky)
    # Another model may have layers of the same names.
    layers = tuple(zip(names, (op.pair_sum for op in risky), strict=True))
    if not names or layers in _warned:
        return
    warnings.warn(
        f"int8 kernels may saturate here and give wrong results in {_shortened(names)}: "
        f"{saturation_advice(rules)}",
        SaturationWarning,
        stacklevel=3,
    )
    _warned.add(layers)  # not if the filter has made an error of it


def saturation_advice(rules: LoweringRules) -> str:
    """What about this CPU makes kernels saturate, and what to do with a model that may.

    Args:
        rules: Rules with ``saturating_pairs``.
    """
    pairs = rules.saturating_pairs
    assert pairs is not None
    return f"{pairs.cause}. {pairs.remedy}"


def _shortened(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class SaturationCheck:
    """A pass that changes nothing and warns about what the lowering before it took.

    Args:
        lowering: The lowering of the same chain.
    """

    runs_after = ("Int8Lowering",)

    def __init__(self, lowering: Int8Lowering) -> None:
        """Keep the lowering whose record to read."""
        self.lowering = lowering

    def __call__(self, graph: Graph) -> None:  # noqa: ARG002 -- the signature of a pass
        """Warn where kernels may saturate."""
        warn_about_saturation(self.lowering.record, self.lowering.rules)

    def uuid(self) -> str:
        """Identity for compile caches."""
        return f"versatil_core.SaturationCheck/1({self.lowering.uuid()})"
