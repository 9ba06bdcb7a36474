"""Warn, once, when int8 kernels may saturate on the CPU at hand."""

import warnings

from torch.fx import Graph

from versatil_passes import Int8Lowering, LoweringRecord, LoweringRules


class SaturationWarning(UserWarning):
    """Kernels of this CPU may add products into a 16-bit value that saturates."""


_warned: list[tuple[str, ...]] = []  # the layers named by the one warning of this process


def warn_about_saturation(record: LoweringRecord, rules: LoweringRules) -> None:
    """Name the layers whose sums may saturate, once in a process.

    Args:
        record: What was lowered.
        rules: The backend's rules; ``safe_input_quant_max`` is what this CPU can take.
    """
    limit = rules.safe_input_quant_max
    if limit is None:
        return
    names = tuple(op.module_path or op.node for op in record.lowered if op.input_quant_max > limit)
    if not names or _warned:
        return
    _warned.append(names)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    warnings.warn(
        f"this CPU has no VNNI: int8 kernels may saturate and give wrong results in {shown}. Quantize with a backend "
        "made by for_host(), or with reduce_range=True, which keeps every sum exact.",
        SaturationWarning,
        stacklevel=3,
    )


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
        return "versatil_core.SaturationCheck/1"
