"""What is read of other machines."""

from versatil_core.host import read_host

X86 = """processor	: 0
model name	: Fast(R) CPU @ 3GHz
flags		: fpu tsc sse2 pni avx2 avx512f avx512_vnni amx_int8

processor	: 1
model name	: another name
flags		: fpu
"""
ARM = """processor	: 0
Features	: fp asimd evtstrm asimddp i8mm bf16 cpuid
"""


def test_host_from_x86_cpuinfo() -> None:
    host = read_host(X86, "x86_64")
    assert host.cpu == "Fast(R) CPU @ 3GHz"
    assert host.features == ("avx2", "avx512f", "avx512_vnni", "amx_int8")
    assert host.instruction_sets == ("amx_int8", "avx2", "avx512_vnni", "avx512f", "pni", "sse2")


def test_host_from_arm_cpuinfo() -> None:
    host = read_host(ARM, "AArch64")
    assert host.machine == "aarch64"
    assert host.features == ("asimd", "asimddp", "i8mm", "bf16")
    assert host.instruction_sets == ("asimd", "asimddp", "bf16", "fp", "i8mm")


def test_host_without_cpuinfo() -> None:
    host = read_host("", "riscv64")
    assert host.features == host.instruction_sets == ()
    assert host.cpu
    assert host.cores >= 1
