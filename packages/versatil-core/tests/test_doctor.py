"""The doctor on machines other than this one, and with broken packages."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from versatil_core import BasePT2EBackend, InductorSettings, doctor
from versatil_core.discovery import BackendEntry
from versatil_core.doctor import (
    BackendHealth,
    examine,
    find_compiler,
    int8_plan,
    saturation_findings,
    toolchain_findings,
)
from versatil_core.errors import BackendLoadError, BackendNotFoundError, UnsupportedVersionError
from versatil_passes import LoweringRules, SaturatingPairs


class FakeBackend(BasePT2EBackend):
    name = "fake"
    inductor_settings = InductorSettings()
    lowering_rules = LoweringRules(
        ("x86_64",),
        ops=frozenset({"linear", "conv2d"}),
        dynamic_ops=frozenset({"linear"}),
        activation_dtypes=(torch.uint8, torch.int8),
        weight_granularities=frozenset({"per_tensor"}),
        post_ops={"linear": frozenset({"relu"})},
        residual_post_ops={"conv2d": frozenset({"relu"})},
        saturating_pairs=SaturatingPairs(
            accumulator_max=32767,
            uncut_features=256,
            cause="this CPU is old",
            remedy="Buy another",
        ),
    )

    def __init__(self, is_dynamic: bool = False, is_qat: bool = False) -> None:
        self.is_dynamic = is_dynamic
        self.is_qat = is_qat

    @property
    def option_reasons(self) -> Mapping[str, str]:
        return {"is_dynamic": "the CPU likes it"}

    def create_quantizer(self, module_path: str = "") -> object:  # type: ignore[override]
        raise NotImplementedError(module_path)


class ExactBackend(FakeBackend):
    lowering_rules = dataclasses.replace(FakeBackend.lowering_rules, saturating_pairs=None)


def entry(name: str, distribution: str = "some-package") -> BackendEntry:
    return BackendEntry(name, distribution, "1.2", "some_module:Class", None)  # type: ignore[arg-type]


def with_backends(
    monkeypatch: pytest.MonkeyPatch, entries: tuple[BackendEntry, ...], broken: tuple[str, ...] = ()
) -> None:
    def load(name: str) -> type[BasePT2EBackend]:
        if name in broken:
            raise BackendLoadError(
                f"{name} is broken", backend=name, distribution="some-package", version="1.2"
            )
        return ExactBackend

    def host() -> BasePT2EBackend:
        if len(entries) > len(broken):
            return ExactBackend()
        raise BackendNotFoundError("install a backend", name=None, installed=())

    monkeypatch.setattr(doctor, "installed_backends", lambda: entries)
    monkeypatch.setattr(doctor, "load_backend", load)
    monkeypatch.setattr(doctor, "host_backend", host)


def test_compiler_is_found_by_inductors_rule() -> None:
    paths = {"g++": "/bin/g++", "clang++": "/bin/clang++", "mine": "/usr/local/mine"}
    assert find_compiler({"CXX": "mine"}, paths.get) == "/usr/local/mine"
    assert find_compiler({}, paths.get) in {"/bin/g++", "/bin/clang++"}
    assert find_compiler({"CXX": "gone"}, paths.get) is None


def test_missing_compiler_and_headers_say_what_to_install(tmp_path: Path) -> None:
    compiler, headers = toolchain_findings(None, tmp_path)
    assert compiler.level == headers.level == "problem"
    assert "apt-get install g++" in compiler.message
    assert str(tmp_path) in headers.message
    assert "python3-dev" in headers.message
    (tmp_path / "Python.h").touch()
    assert toolchain_findings("/bin/g++", tmp_path) == []


def test_saturation_is_a_risk_only_where_kernels_saturate() -> None:
    [risk] = saturation_findings(FakeBackend())
    assert risk.level == "risk"
    assert risk.message.startswith("a model quantized with other options than the ones above")
    assert risk.message.endswith(
        "(`versatil inspect` names its layers): this CPU is old. Buy another"
    )
    assert saturation_findings(ExactBackend()) == []


def test_plan_says_what_int8_uses() -> None:
    plan = int8_plan(FakeBackend(is_dynamic=True))
    assert plan.options == {"is_dynamic": True, "is_qat": False}
    assert plan.reasons == {"is_dynamic": "the CPU likes it"}
    assert plan.ops == ("conv2d (static)", "linear (static, dynamic)")
    assert plan.activations == ("uint8", "int8")
    assert plan.weights == ("per_tensor",)
    assert plan.post_ops == ("add", "relu")


def test_plan_names_the_instructions_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, wanted in (
        (("avx2", "avx512_bf16", "amx_bf16"), ("amx_bf16", "avx512_bf16")),
        (("asimd", "bf16"), ("bf16",)),
        (("avx2",), ()),
    ):
        monkeypatch.setattr(FakeBackend, "cpu_features", flags)
        assert int8_plan(FakeBackend()).bfloat16 == wanted


def test_a_broken_backend_is_reported_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with_backends(monkeypatch, (entry("good"), entry("bad")), broken=("bad",))
    diagnosis = examine()
    assert diagnosis.backends == (
        BackendHealth("good", "some-package", "1.2", None),
        BackendHealth("bad", "some-package", "1.2", "bad is broken"),
    )
    assert "bad is broken" in [finding.message for finding in diagnosis.findings]
    assert diagnosis.int8 is not None


def test_a_conflict_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (entry("same"), entry("same", "other-package"))
    with_backends(monkeypatch, entries, broken=("same", "same"))
    messages = [finding.message for finding in examine().findings]
    assert messages.count("same is broken") == 1


def test_no_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with_backends(monkeypatch, ())
    diagnosis = examine()
    assert diagnosis.int8 is None
    assert "install a backend" in [finding.message for finding in diagnosis.findings]


def test_an_untested_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(distribution: str, installed: str, supported: str) -> None:
        if distribution == "torch":
            raise UnsupportedVersionError(
                "torch is too old",
                distribution=distribution,
                version=installed,
                supported=supported,
            )

    with_backends(monkeypatch, (entry("good"),))
    monkeypatch.setattr(doctor, "check_version", check)
    diagnosis = examine()
    assert [f.message for f in diagnosis.findings if f.level == "problem"] == ["torch is too old"]
    assert diagnosis.versions["torch"]


def test_problems_come_before_risks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_backends(monkeypatch, (entry("good"), entry("bad")), broken=("bad",))
    monkeypatch.setattr(doctor, "host_backend", FakeBackend)
    assert [finding.level for finding in examine().findings] == ["problem", "risk"]


def test_diagnosis_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    with_backends(monkeypatch, (entry("good"),))
    int8 = json.loads(json.dumps(examine().to_dict()))["int8"]
    assert int8["backend"] == "fake"
    assert int8["reasons"] == {"is_dynamic": "the CPU likes it"}
