"""What the cross-package tests share: clean interpreters and the built wheels."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Return a function that runs code in a new interpreter, away from the sources."""

    def run(
        code: str, *, path: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ, PYTHONSAFEPATH="1")
        environment.pop("PYTHONPATH", None)
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.Path]:
    """Return the wheel of each package by its distribution name, built if need be."""
    given = os.environ.get("VERSATIL_WHEELHOUSE")
    wheelhouse = Path(given) if given else tmp_path_factory.mktemp("wheelhouse")
    script = ROOT / "tools" / "wheels.py"
    subprocess.run(
        [sys.executable, str(script), "build", "--wheelhouse", str(wheelhouse)], check=True
    )
    return {
        path.name.split("-")[0].replace("_", "-"): zipfile.Path(path)
        for path in sorted(wheelhouse.glob("*/*.whl"))
    }
