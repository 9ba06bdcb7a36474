"""Features follow from the words of the kernel, and those from the machine."""

import platform
import sys
from pathlib import Path

import pytest

from versatil_arm import CPUFeatures, cpu_features
from versatil_arm.rules import MACHINE_TYPES

# As in Linux' arch/arm64/include/uapi/asm/hwcap.h.
ASIMD, ASIMDDP, SVE = 1 << 1, 1 << 20, 1 << 22
I8MM, BF16 = 1 << 13, 1 << 14


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ((0, 0), CPUFeatures()),
        ((ASIMD, 0), CPUFeatures()),
        ((ASIMD | ASIMDDP, 0), CPUFeatures(dotprod=True)),
        ((SVE, 0), CPUFeatures(sve=True)),
        ((0, I8MM), CPUFeatures(i8mm=True)),
        ((0, BF16), CPUFeatures(bf16=True)),
        ((I8MM | BF16, ASIMDDP | SVE), CPUFeatures()),  # the words are not interchangeable
        ((2**64 - 1, 2**64 - 1), CPUFeatures(dotprod=True, i8mm=True, bf16=True, sve=True)),
    ],
)
def test_words(words: tuple[int, int], want: CPUFeatures) -> None:
    assert CPUFeatures.from_hwcaps(*words) == want


def test_text() -> None:
    assert str(CPUFeatures()) == "no dotprod"
    assert str(CPUFeatures(dotprod=True)) == "dotprod"
    assert str(CPUFeatures(True, True, True, True)) == "dotprod, i8mm, bf16, sve"


@pytest.mark.parametrize(
    ("system", "machine"), [("linux", "x86_64"), ("darwin", "arm64"), ("win32", "arm64")]
)
def test_another_machine_has_none(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sys.platform", system)
    cpu_features._host_hwcaps.cache_clear()
    try:
        assert CPUFeatures.detect() == CPUFeatures()
    finally:
        cpu_features._host_hwcaps.cache_clear()


def test_an_arm_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words come from ``getauxval``, whose numbers are the same on all of Linux."""
    if sys.platform != "linux":
        pytest.skip("getauxval is Linux'")
    # A machine that calls itself aarch64; on x86 its words mean other things, so only that they are read is tested.
    monkeypatch.setattr("platform.machine", lambda: "AARCH64")
    cpu_features._host_hwcaps.cache_clear()
    try:
        assert cpu_features._host_hwcaps() != (0, 0)
    finally:
        cpu_features._host_hwcaps.cache_clear()


@pytest.mark.arm
def test_this_machine() -> None:
    """What the kernel says in words is what it says in text."""
    assert platform.machine() in MACHINE_TYPES
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    flags = next(line for line in lines if line.startswith("Features")).split()

    features = CPUFeatures.detect()

    assert features.dotprod is ("asimddp" in flags)
    assert features.i8mm is ("i8mm" in flags)
    assert features.bf16 is ("bf16" in flags)
    assert features.sve is ("sve" in flags)
