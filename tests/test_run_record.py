"""A run of the tests is written down, and one in which nothing was compiled has failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
TESTS = """
import os
from pathlib import Path
import pytest

def test_compiles():
    {compiles}

def test_passes():
    pass

@pytest.mark.skip(reason="no such kernel here")
def test_skipped():
    raise LookupError

@pytest.mark.xfail(reason="known", strict=True)
def test_known():
    raise LookupError
"""
COMPILES = 'Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "model.main.so").touch()'


def run(folder: Path, compiles: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin on a folder of its own."""
    tests, cache = folder / "tests", folder / "cache"
    tests.mkdir()
    cache.mkdir()
    (tests / "test_it.py").write_text(TESTS.format(compiles=compiles), encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(TOOLS),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "VERSATIL_RUN_RECORD": str(folder / "results" / "x86.json"),
        "VERSATIL_RUN_PACKAGE": "versatil-x86",
    }
    command = [sys.executable, "-m", "pytest", "-p", "run_record", "-p", "no:cacheprovider", "-c", os.devnull]  # fmt: skip
    return subprocess.run(
        [*command, "--rootdir", str(folder), *arguments, str(tests)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def written(folder: Path) -> Any:
    return json.loads((folder / "results" / "x86.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_run_is_written_down(tmp_path: Path, workers: tuple[str, ...]) -> None:
    done = run(tmp_path, COMPILES, *workers)

    assert done.returncode == 0, done.stdout
    record = written(tmp_path)
    assert record["is_passed"] is True
    assert record["package"] == "versatil-x86"
    assert record["counts"] == {
        "passed": 2,
        "failed": 0,
        "error": 0,
        "skipped": 1,
        "xfailed": 1,
        "xpassed": 0,
    }
    assert record["skipped"] == {"no such kernel here": 1}
    assert record["compiled_libraries"] == 1
    assert record["versions"]["torch"]
    assert record["cpu"]
    assert record["sources"]
    assert len(record["date"]) == len("2026-11-30")


def test_a_run_that_compiles_nothing_has_failed(tmp_path: Path) -> None:
    # Inductor looks at the processor by compiling, too.
    trial = COMPILES.replace("model.main.so", "trial.so")
    done = run(tmp_path, f"{trial}; pytest.skip('no compiler')")

    assert done.returncode == 1
    assert "nothing was compiled; this run proves nothing" in done.stdout
    assert written(tmp_path)["is_passed"] is False


def test_a_failed_run_is_written_down_as_failed(tmp_path: Path) -> None:
    done = run(tmp_path, f"{COMPILES}; raise LookupError")

    assert done.returncode == 1
    assert written(tmp_path)["is_passed"] is False
    assert written(tmp_path)["counts"]["failed"] == 1


@pytest.mark.parametrize(
    "narrow",
    [
        ("-k", "passes"),
        ("-m", "not slow"),
        ("--collect-only",),
        ("--deselect", "tests/test_it.py::test_passes"),
        ("--ignore", "tests/test_other.py"),
    ],
)
def test_a_run_of_some_tests_is_not(tmp_path: Path, narrow: tuple[str, ...]) -> None:
    done = run(tmp_path, COMPILES, *narrow)

    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "results").exists()
