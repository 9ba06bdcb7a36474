"""What int8 will run on here: the CPU, the software, the backends, and what is risky."""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.discovery import BackendEntry, host_backend, installed_backends, load_backend
from versatil_core.errors import UnsupportedVersionError
from versatil_core.host import Host, read_host
from versatil_core.saturation import saturation_advice
from versatil_core.versions import SUPPORTED_VERSIONS, check_pair, check_version, installed_version
from versatil_passes.errors import VersatilError
from versatil_passes.lowering_rules import LoweringRules

__all__ = ["BackendHealth", "Diagnosis", "Finding", "Int8Plan", "examine"]


_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True)
class Finding:
    """Something that will fail (a problem) or may go wrong (a risk), and what to do.

    Attributes:
        level: ``"problem"`` or ``"risk"``.
        message: What is the matter, and what to do.
    """

    level: str
    message: str


@dataclass(frozen=True)
class BackendHealth:
    """One registered backend.

    Attributes:
        name: Registered name.
        distribution: The distribution that registers it.
        version: Its version.
        error: Why it can't be used, None if it can.
    """

    name: str
    distribution: str
    version: str
    error: str | None


@dataclass(frozen=True)
class Int8Plan:
    """What a model quantized for this machine will use.

    Attributes:
        backend: Registered name.
        options: Constructor options that are right on this CPU.
        reasons: Option -> why it has its value.
        ops: Operators with an int8 kernel; ``"linear (static, dynamic)"``.
        activations: Dtypes of quantized activations.
        weights: Granularities of quantized weights.
        post_ops: Functions that run inside the kernels.
        bfloat16: Instruction sets of this CPU that compute in bfloat16; without any, a model with
            ``float_dtype="bfloat16"`` works, and is not faster.
    """

    backend: str
    options: Mapping[str, Any]
    reasons: Mapping[str, str]
    ops: tuple[str, ...]
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    post_ops: tuple[str, ...]
    bfloat16: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``versatil doctor`` shows."""

    host: Host
    python: str
    versions: Mapping[str, str]
    compiler: str | None
    backends: tuple[BackendHealth, ...]
    int8: Int8Plan | None
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return asdict(self)


def examine() -> Diagnosis:
    """Look at this machine; nothing on it is changed, and no fault raises.

    Returns:
        What is there and what is the matter with it.
    """
    versions, findings = _versions()
    compiler = find_compiler(os.environ, shutil.which)
    findings += toolchain_findings(compiler, Path(sysconfig.get_path("include")))
    backends = tuple(_health(entry) for entry in installed_backends())
    errors = dict.fromkeys(health.error for health in backends if health.error)
    findings += [Finding("problem", error) for error in errors]  # a conflict is one problem
    plan = None
    try:
        backend = host_backend()
    except VersatilError as error:
        if not errors:
            findings.append(Finding("problem", str(error)))
    else:
        plan = int8_plan(backend)
        findings += saturation_findings(backend)
    return Diagnosis(
        host=read_host(),
        python=platform.python_version(),
        versions=versions,
        compiler=compiler,
        backends=backends,
        int8=plan,
        findings=tuple(sorted(findings, key=lambda finding: finding.level)),
    )


def find_compiler(environ: Mapping[str, str], which: Callable[[str], str | None]) -> str | None:
    """Find the C++ compiler that Inductor will call, by Inductor's own rule.

    Args:
        environ: Environment variables; ``CXX`` overrides the default.
        which: Finds a program's path.

    Returns:
        Its path, None if there is none.
    """
    default = "clang++" if sys.platform == "darwin" else "g++"
    return which(environ.get("CXX") or default)


def toolchain_findings(compiler: str | None, include: Path) -> list[Finding]:
    """Say what Inductor lacks to compile: a C++ compiler, Python's headers."""
    findings = []
    if compiler is None:
        findings.append(
            Finding(
                "problem",
                "no C++ compiler: compile() will fail. Install one (Debian, Ubuntu: "
                "apt-get install g++; Fedora: dnf install gcc-c++), or point CXX to one",
            )
        )
    if not (include / "Python.h").is_file():
        findings.append(
            Finding(
                "problem",
                f"no Python.h in {include}: compile() will fail. Install Python's headers "
                "(Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install "
                "python3-devel)",
            )
        )
    return findings


def saturation_findings(backend: BasePT2EBackend) -> list[Finding]:
    """Warn where the int8 kernels of this CPU may saturate, and say what prevents it."""
    rules = backend.lowering_rules
    if rules.saturating_pairs is None:
        return []
    return [
        Finding(
            "risk",
            "a model quantized with other options than the ones above, say for another CPU, can give "
            f"wrong results here (`versatil inspect` names its layers): {saturation_advice(rules)}",
        )
    ]


def int8_plan(backend: BasePT2EBackend) -> Int8Plan:
    """Say what a model quantized with ``backend`` will use."""
    rules = backend.lowering_rules
    post_ops = frozenset[str]().union(
        *rules.post_ops.values(), {"add"} if rules.residual_post_ops else ()
    )
    return Int8Plan(
        backend=backend.name,
        options=backend_options(backend),
        reasons=dict(backend.option_reasons),
        ops=tuple(_op_with_modes(rules, op) for op in sorted(rules.ops)),
        activations=tuple(str(d).removeprefix("torch.") for d in rules.activation_dtypes),
        weights=tuple(sorted(rules.weight_granularities)),
        post_ops=tuple(sorted(post_ops)),
        bfloat16=tuple(sorted(_BFLOAT16.intersection(backend.cpu_features))),
    )


def _op_with_modes(rules: LoweringRules, op: str) -> str:
    return f"{op} (static, dynamic)" if op in rules.dynamic_ops else f"{op} (static)"


def _versions() -> tuple[dict[str, str], list[Finding]]:
    versions: dict[str, str] = {}
    findings = []
    for distribution, supported in SUPPORTED_VERSIONS.items():
        try:
            versions[distribution] = installed_version(distribution)
            check_version(distribution, versions[distribution], supported)
        except UnsupportedVersionError as error:
            versions.setdefault(distribution, error.version)
            findings.append(Finding("problem", str(error)))
    try:
        if not findings:
            check_pair(**versions)
    except UnsupportedVersionError as error:
        findings.append(Finding("problem", str(error)))
    return versions, findings


def _health(entry: BackendEntry) -> BackendHealth:
    error = None
    try:
        load_backend(entry.name)
    except VersatilError as failure:
        error = str(failure)
    return BackendHealth(entry.name, entry.distribution, entry.version, error)
