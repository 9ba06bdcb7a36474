"""Features follow from flags, and the flags from the machine."""

import pytest

from versatil_x86 import CPUFeatures, cpu_features

MODERN = (
    *("fma", "avx", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8"),
)
AVX512 = frozenset({"avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq"})


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (frozenset(), CPUFeatures()),
        (frozenset({"avx2", "fma"}), CPUFeatures(avx2=True)),
        (frozenset({"avx2", "avx_vnni"}), CPUFeatures(avx2=True, avx_vnni=True)),
        (AVX512, CPUFeatures(avx2=True, avx512=True)),
        (AVX512 - {"avx512bw"}, CPUFeatures(avx2=True)),
        (AVX512 | {"avx512_vnni"}, CPUFeatures(avx2=True, avx512=True, avx512_vnni=True)),
        (AVX512 | {"avx512vnni"}, CPUFeatures(avx2=True, avx512=True, avx512_vnni=True)),
        (
            AVX512 | {"avx512_vnni", "avx512_bf16", "amx_int8"},
            CPUFeatures(avx2=True, avx512=True, avx512_vnni=True, avx512_bf16=True, amx_int8=True),
        ),
    ],
)
def test_flags(flags: frozenset[str], want: CPUFeatures) -> None:
    assert CPUFeatures.from_flags(flags) == want


@pytest.mark.parametrize(
    ("features", "has_vnni"),
    [
        (CPUFeatures(avx2=True, avx512=True), False),
        (CPUFeatures(avx512_vnni=True), True),
        (CPUFeatures(avx_vnni=True), True),
        (CPUFeatures(amx_int8=True), True),
    ],
)
def test_vnni(features: CPUFeatures, *, has_vnni: bool) -> None:
    assert features.has_vnni is has_vnni


def test_another_machine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    cpu_features._host_flags.cache_clear()
    try:
        assert CPUFeatures.detect() == CPUFeatures()
    finally:
        cpu_features._host_flags.cache_clear()


def test_systems_without_proc(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    monkeypatch.setattr(cpu_features, "_CPUINFO", tmp_path_factory.mktemp("x") / "missing")
    monkeypatch.setattr("cpuinfo.get_cpu_info", lambda: {"flags": ["avx2", "avx512_vnni"]})
    cpu_features._host_flags.cache_clear()
    try:
        assert CPUFeatures.detect() == CPUFeatures(avx2=True, avx512_vnni=True)
    finally:
        cpu_features._host_flags.cache_clear()


@pytest.mark.parametrize(
    ("max_isa", "vnni"),
    [
        ("AVX2", False),
        ("avx2", False),
        ("AVX512_CORE", False),
        ("AVX2_VNNI", True),
        ("AVX512_CORE_VNNI", True),
        ("AVX512_CORE_AMX", True),
        ("ALL", True),
        ("", True),
    ],
)
def test_a_limit_of_onednn_is_a_limit_of_the_features(
    max_isa: str, *, vnni: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = AVX512 | {"avx512_vnni", "avx_vnni", "amx_int8"}
    monkeypatch.setattr(cpu_features, "_host_flags", lambda: flags)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", max_isa)

    assert CPUFeatures.detect().has_vnni is vnni
    assert CPUFeatures.detect().avx2


@pytest.mark.parametrize(
    ("max_isa", "forbidden"),
    [
        ("", set()),
        ("DEFAULT", set()),
        ("AVX512_CORE_FP16", {"amx_tile", "amx_int8"}),
        ("AVX512_CORE_VNNI", {"amx_tile", "amx_int8", "avx512_bf16", "avx_vnni"}),
        ("avx512_core", {"amx_tile", "amx_int8", "avx512_bf16", "avx_vnni", "avx512_vnni"}),
        ("AVX2_VNNI", {"amx_tile", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f"}),
        ("SSE41", {*MODERN} - {"fma", "avx"}),
    ],
)
def test_a_limit_forbids_flags(max_isa: str, forbidden: set[str]) -> None:
    allowed = cpu_features.allowed_flags(MODERN, max_isa)

    assert allowed == tuple(flag for flag in MODERN if flag not in forbidden)
