"""What keeps int8 kernels from saturating on x86 CPUs without VNNI, and why it was chosen."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from versatil_core.errors import BackendOptionError
from versatil_x86.cpu_features import CPUFeatures

Saturation = Literal["safe", "reduce_range", "ignore"]
BACKEND_NAME = "x86_inductor"


@dataclass(frozen=True)
class SaturationChoice:
    """How quantizing prevents saturation.

    Attributes:
        saturation: ``"safe"``: the scale of each weight is chosen so that no pair of products can saturate.
            ``"reduce_range"``: activations use 7 of their 8 bits. ``"ignore"``: nothing prevents it; exact on CPUs
            with VNNI.
        reason: Why, in words.
    """

    saturation: Saturation
    reason: str


def choose_saturation(
    wanted: str | None, *, reduce_range: bool = False, features: CPUFeatures | None = None
) -> SaturationChoice:
    """Resolve the options ``saturation`` and ``reduce_range`` of the backend.

    Args:
        wanted: A value of ``SaturationChoice.saturation``, or ``"auto"`` for what the CPU needs, or None for what
            ``reduce_range`` says.
        reduce_range: As in torchao.
        features: The CPU for ``"auto"``; this machine's if None.

    Raises:
        BackendOptionError: There is no such value, or the two options disagree.
    """
    known = (*get_args(Saturation), "auto")
    if wanted is not None and wanted not in known:
        raise BackendOptionError(
            BACKEND_NAME, "saturation", wanted, f"choose one of {', '.join(known)}"
        )
    if reduce_range and wanted not in (None, "reduce_range"):
        raise BackendOptionError(
            BACKEND_NAME,
            "saturation",
            wanted,
            'it contradicts reduce_range=True, which means saturation="reduce_range": leave one of the two out',
        )
    if wanted == "auto":
        return _choice_for(CPUFeatures.detect() if features is None else features)
    if wanted is None and not reduce_range:
        return SaturationChoice("ignore", "the default; exact on CPUs with VNNI only")
    chosen = cast("Saturation", wanted or "reduce_range")
    return SaturationChoice(chosen, "chosen by the caller")


def _choice_for(features: CPUFeatures) -> SaturationChoice:
    if features.has_vnni:
        return SaturationChoice(
            "ignore",
            f"the CPU ({features}) has VNNI, which adds products in 32 bits: none saturates",
        )
    return SaturationChoice(
        "safe",
        f"the CPU ({features}) has no VNNI and adds two products in 16 bits, which saturates",
    )
