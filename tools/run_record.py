"""A pytest plugin: write down what a run of the tests showed, and fail one that shows nothing.

    PYTHONPATH=tools VERSATIL_RUN_RECORD=results/x86.json python -m pytest -p run_record ...

The record is what docs/compatibility.md says "proved" from. A run in which Inductor compiled
nothing says nothing about int8 kernels, whatever else passed, so it has failed. A run of some
tests only (``-k``, ``-m``, a path) is neither recorded nor judged.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from wheels import source_digest
from whole_files import write_whole

# Options of pytest that leave tests out.
NARROWING = ("keyword", "markexpr", "lf", "deselect", "ignore", "ignore_glob")
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
# As /proc/cpuinfo has them; which kernels oneDNN and the Arm Compute Library take depends on these.
CPU_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")
DISTRIBUTIONS = ("torch", "torchao", "versatil-passes", "versatil-core", "versatil-x86", "versatil-arm")  # fmt: skip


sessions: list[pytest.Session] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a whole run that compiled nothing."""
    sessions.append(session)
    if is_recorded(session.config) and not compiled_count():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Write the record; here every outcome is counted, also those of other processes."""
    if not is_recorded(config):
        return
    if not compiled_count():
        terminalreporter.write_line("run_record: nothing was compiled; this run proves nothing", red=True)  # fmt: skip
    stats = terminalreporter.stats
    counts = {outcome: len(stats.get(outcome, [])) for outcome in OUTCOMES}
    path = Path(os.environ["VERSATIL_RUN_RECORD"])
    # Not the exit code of a moment ago: other plugins, too, may have failed the run since.
    is_passed = all(session.exitstatus == 0 for session in sessions)
    content = record(counts, skip_reasons(stats.get("skipped", [])), is_passed=is_passed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=2) + "\n")
    terminalreporter.write_line(f"run_record: {path.name}")


def is_recorded(config: pytest.Config) -> bool:
    """Whether this is the process that reports, on a run of all tests of a package."""
    is_worker = hasattr(config, "workerinput")
    narrowed = any(getattr(config.option, option, None) for option in NARROWING)
    is_one_folder = len(config.args) == 1 and Path(config.args[0].partition("::")[0]).is_dir()
    wanted = "VERSATIL_RUN_RECORD" in os.environ and not config.option.collectonly
    return wanted and is_one_folder and not is_worker and not narrowed


def compiled_count() -> int:
    """Return how many libraries Inductor has compiled in this run: its cache is the run's own.

    They end in ``.main.so``; those without ``main`` are its trials of what the processor can do.
    """
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return sum(1 for _ in Path(cache).rglob("*.main.so")) if cache else 0


def record(counts: dict[str, int], skipped: dict[str, int], *, is_passed: bool) -> dict[str, Any]:
    """Return what is written: versions, the machine, and what the tests came to."""
    return {
        "package": os.environ["VERSATIL_RUN_PACKAGE"],
        "is_passed": is_passed,
        "counts": counts,
        "skipped": skipped,
        "compiled_libraries": compiled_count(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in DISTRIBUTIONS if version_of(name)},
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "is_emulated": "QEMU_LD_PREFIX" in os.environ,
        "sources": source_digest(),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
    }


def skip_reasons(reports: list[pytest.TestReport]) -> dict[str, int]:
    """Count the skipped tests by their reason."""
    reasons = Counter(
        str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in reports
    )
    return {reason.removeprefix("Skipped: "): count for reason, count in sorted(reasons.items())}


def version_of(distribution: str) -> str:
    """Return the version of a distribution, or "" if it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """Return what the system calls the processor, and what of int8 kernels it can do."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    facts = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = facts.get("flags", facts.get("Features", "")).split()
    return ", ".join([name, *(flag for flag in CPU_FLAGS if flag in flags)])
