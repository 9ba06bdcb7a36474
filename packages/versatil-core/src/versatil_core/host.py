"""This machine: its processor and the instruction sets that it has."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

# The instruction sets that decide how fast and how exact int8 is, by their kernel names.
INT8_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
# Of the flags of an x86 CPU, those that a compiler told to use this very CPU may act on (GCC
# manual, "x86 Options"). All that Linux lists for an Arm CPU are such, but the last two.
_X86_INSTRUCTIONS = re.compile(
    r"s?sse|pni$|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|aes|v?pclmulqdq|vaes|gfni|sha|adx|cx16|xop|tbm"
)
_NO_ARM_INSTRUCTIONS = frozenset({"cpuid", "evtstrm"})


@dataclass(frozen=True)
class Host:
    """This machine.

    Attributes:
        cpu: The processor's name.
        machine: ``platform.machine()`` in lower case.
        cores: Physical cores.
        features: Those of `INT8_FEATURES` that the CPU has.
        instruction_sets: All that compiled code may use, by their kernel names, sorted.
    """

    cpu: str
    machine: str
    cores: int
    features: tuple[str, ...]
    instruction_sets: tuple[str, ...] = ()


def read_host(cpuinfo: str | None = None, machine: str | None = None) -> Host:
    """Read what this machine is.

    Args:
        cpuinfo: Text as in Linux's ``/proc/cpuinfo``; this machine's if None.
        machine: As ``platform.machine()``; this machine's if None.

    Returns:
        The host. Without ``/proc/cpuinfo`` it has no features.
    """
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text(encoding="utf-8") if path.is_file() else ""
    machine = (machine or platform.machine()).lower()
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    is_x86 = "flags" in fields
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return Host(
        cpu=fields.get("model name") or platform.processor() or machine,
        machine=machine,
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        features=tuple(name for name in INT8_FEATURES if name in flags),
        instruction_sets=tuple(
            sorted(filter(_is_x86_instruction, flags) if is_x86 else flags - _NO_ARM_INSTRUCTIONS)
        ),
    )


def _is_x86_instruction(flag: str) -> bool:
    return _X86_INSTRUCTIONS.match(flag) is not None
