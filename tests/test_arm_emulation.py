"""A run that is there to test Arm kernels and tests none has failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools" / "arm_emulation"
CODE = """
import pytest

@pytest.mark.arm
def test_kernel():
    {kernel}

@pytest.mark.arm
@pytest.mark.xfail(reason="known", strict=True)
def test_known():
    raise LookupError

def test_other():
    pytest.skip("has nothing to do with it")
"""
INI = "[pytest]\nmarkers = arm: runs an Arm kernel\n"


@pytest.mark.parametrize(
    ("kernel", "plugin", "exit_code"),
    [
        ("pass", "no_kernel_skipped", 0),
        ("pytest.skip('this is no Arm CPU')", "no_kernel_skipped", 1),
        ("pytest.skip('this is no Arm CPU')", "no:no_kernel_skipped", 0),
        ("raise LookupError", "no_kernel_skipped", 1),
    ],
)
def test_a_skipped_kernel_test_fails_the_run(
    tmp_path: Path, kernel: str, plugin: str, exit_code: int
) -> None:
    (tmp_path / "pytest.ini").write_text(INI, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(CODE.format(kernel=kernel), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "."]

    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TOOLS)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == exit_code, done.stdout
    said = "1 tests of Arm kernels were skipped, first test_it.py::test_kernel" in done.stdout
    assert said is (kernel.startswith("pytest.skip") and plugin == "no_kernel_skipped")
