"""What the CPU can do, as far as int8 kernels care."""

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Self

MAX_ISA = "ONEDNN_MAX_CPU_ISA"
_CPUINFO = Path("/proc/cpuinfo")
# What oneDNN may use if ONEDNN_MAX_CPU_ISA limits it (oneDNN developer guide, "CPU Dispatcher Control"); the names
# that are not here limit nothing that matters.
_WITHIN_ISA: dict[str, tuple[str, ...]] = {
    "SSE41": (),
    "AVX": (),
    "AVX2": ("avx2",),
    "AVX2_VNNI": ("avx2", "avx_vnni"),
    "AVX2_VNNI_2": ("avx2", "avx_vnni"),
    "AVX512_CORE": ("avx2", "avx512"),
    "AVX512_CORE_VNNI": ("avx2", "avx512", "avx512_vnni"),
    "AVX512_CORE_BF16": ("avx2", "avx512", "avx512_vnni", "avx512_bf16"),
    "AVX512_CORE_FP16": ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx_vnni"),
}
# How the flags begin that go with a feature, the longer ones first.
_FEATURE_OF_FLAG = {
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512": "avx512",
    "avx_vnni": "avx_vnni",
    "avx2": "avx2",
    "amx": "amx_int8",
}


@dataclass(frozen=True)
class CPUFeatures:
    """The instruction sets that decide which int8 kernel oneDNN takes.

    Attributes:
        avx2: 256-bit integers.
        avx512: 512-bit integers on bytes and words (avx512bw with vl and dq).
        avx512_vnni: Products of four u8·s8 pairs summed into s32, 512 bits wide.
        avx_vnni: The same, 256 bits wide.
        amx_int8: Tile multiplication of int8.
        avx512_bf16: Dot products of bfloat16.

    Example:
        >>> CPUFeatures(avx2=True).has_vnni
        False
    """

    avx2: bool = False
    avx512: bool = False
    avx512_vnni: bool = False
    avx_vnni: bool = False
    amx_int8: bool = False
    avx512_bf16: bool = False

    @property
    def has_vnni(self) -> bool:
        """Whether u8·s8 products are summed in s32.

        Without it, two products are first added in s16, and that sum saturates.
        """
        return self.avx512_vnni or self.avx_vnni or self.amx_int8

    def __str__(self) -> str:
        """The features it has, such as ``"avx2, avx_vnni"``."""
        present = (field.name for field in fields(self) if getattr(self, field.name))
        return ", ".join(present) or "no AVX2"

    @classmethod
    def detect(cls) -> Self:
        """Return the features of this machine that oneDNN may use; none on a machine that is not x86.

        The environment variable ``ONEDNN_MAX_CPU_ISA`` limits them, as it limits oneDNN itself.
        """
        features = cls.from_flags(_host_flags())
        return features.within(os.environ.get(MAX_ISA, ""))

    def within(self, max_isa: str) -> Self:
        """Return those features that oneDNN uses under a limit.

        Args:
            max_isa: As in ``ONEDNN_MAX_CPU_ISA``, such as ``"AVX2"``; other texts limit nothing.

        Example:
            >>> CPUFeatures(avx2=True, avx_vnni=True).within("AVX2").has_vnni
            False
        """
        kept = _WITHIN_ISA.get(max_isa.upper())
        if kept is None:
            return self
        return type(self)(**{name: getattr(self, name) for name in kept})

    @classmethod
    def from_flags(cls, flags: frozenset[str]) -> Self:
        """Return the features that a set of CPU flags stands for.

        Args:
            flags: Flags as Linux writes them into ``/proc/cpuinfo``.
        """
        return cls(
            avx2="avx2" in flags,
            avx512={"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags,
            # cpuinfo's two sources spell these with and without the underscore.
            avx512_vnni=not flags.isdisjoint({"avx512_vnni", "avx512vnni"}),
            avx_vnni=not flags.isdisjoint({"avx_vnni", "avxvnni"}),
            amx_int8=not flags.isdisjoint({"amx_int8", "amxint8"}),
            avx512_bf16=not flags.isdisjoint({"avx512_bf16", "avx512bf16"}),
        )


def allowed_flags(flags: Iterable[str], max_isa: str) -> tuple[str, ...]:
    """Return those CPU flags that kernels may use under a limit.

    Args:
        flags: Flags as Linux writes them into ``/proc/cpuinfo``.
        max_isa: As in ``ONEDNN_MAX_CPU_ISA``; other texts limit nothing.

    Example:
        >>> allowed_flags(["fma", "avx2", "avx512f", "avx512_vnni"], "AVX512_CORE")
        ('fma', 'avx2', 'avx512f')
    """
    everything = {field.name: True for field in fields(CPUFeatures)}
    allowed = CPUFeatures(**everything).within(max_isa)
    return tuple(flag for flag in flags if getattr(allowed, _feature_of(flag), True))


def _feature_of(flag: str) -> str:
    """Return the feature that a flag comes with; empty if no limit concerns it."""
    return next((name for start, name in _FEATURE_OF_FLAG.items() if flag.startswith(start)), "")


@cache
def _host_flags() -> frozenset[str]:
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return frozenset()
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    # Slower, since it starts processes, but knows systems without /proc.
    import cpuinfo

    return frozenset(cpuinfo.get_cpu_info().get("flags", ()))
