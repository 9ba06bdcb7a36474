"""The public names are those in ``packages/*/public_api.txt``, a file one can diff."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


TOOL = ROOT / "tools" / "public_api.py"


@pytest.mark.parametrize(
    "package", ["versatil-passes", "versatil-core", "versatil-x86", "versatil-arm"]
)
def test_public_api_is_as_written_down(package: str) -> None:
    described = subprocess.run(
        [sys.executable, str(TOOL), package], capture_output=True, text=True, check=True
    ).stdout

    written = (ROOT / "packages" / package / "public_api.txt").read_text(encoding="utf-8")

    assert described == written, "run `python tools/public_api.py --write` and review the diff"


@pytest.mark.parametrize(
    "module", ["versatil_passes", "versatil_core", "versatil_x86", "versatil_arm"]
)
def test_public_names_exist_and_are_documented(module: str) -> None:
    package = importlib.import_module(module)

    assert sorted(package.__all__) == sorted(set(package.__all__))
    for name in package.__all__:
        value = getattr(package, name)
        assert name == "__version__" or value.__doc__, f"{name} has no docstring"
