"""What the CPU can do, as far as int8 kernels care."""

import ctypes
import platform
import sys
from dataclasses import dataclass, fields
from functools import cache
from typing import Self

from versatil_arm.rules import MACHINE_TYPES

# Linux' include/uapi/linux/auxvec.h
_AT_HWCAP = 16
_AT_HWCAP2 = 26


@dataclass(frozen=True)
class CPUFeatures:
    """The instruction sets that decide how fast int8 is.

    Attributes:
        dotprod: Sums of four int8 products in 32 bits (SDOT, UDOT).
        i8mm: Products of int8 matrices (SMMLA).
        bf16: Products of bfloat16.
        sve: Vectors of the length that the CPU has.

    Example:
        >>> str(CPUFeatures(dotprod=True, i8mm=True))
        'dotprod, i8mm'
    """

    dotprod: bool = False
    i8mm: bool = False
    bf16: bool = False
    sve: bool = False

    def __str__(self) -> str:
        """The features it has, such as ``"dotprod, i8mm"``."""
        present = (field.name for field in fields(self) if getattr(self, field.name))
        return ", ".join(present) or "no dotprod"

    @classmethod
    def detect(cls) -> Self:
        """Return the features of this machine; none on a machine that is not Linux on Arm."""
        return cls.from_hwcaps(*_host_hwcaps())

    @classmethod
    def from_hwcaps(cls, hwcap: int, hwcap2: int) -> Self:
        """Return the features that the kernel's words stand for.

        Args:
            hwcap: ``getauxval(AT_HWCAP)``; the bits are those of Linux' ``arch/arm64/include/uapi/asm/hwcap.h``.
            hwcap2: ``getauxval(AT_HWCAP2)``.
        """
        return cls(
            dotprod=bool(hwcap & 1 << 20),
            sve=bool(hwcap & 1 << 22),
            i8mm=bool(hwcap2 & 1 << 13),
            bf16=bool(hwcap2 & 1 << 14),
        )


@cache
def _host_hwcaps() -> tuple[int, int]:
    if sys.platform != "linux" or platform.machine().lower() not in MACHINE_TYPES:
        return 0, 0
    libc = ctypes.CDLL(None)
    getauxval = ctypes.CFUNCTYPE(ctypes.c_ulong, ctypes.c_ulong)(("getauxval", libc))
    return getauxval(_AT_HWCAP), getauxval(_AT_HWCAP2)
