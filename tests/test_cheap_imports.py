"""Importing a package doesn't drag in what only some of its functions need."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunPython

EXPENSIVE = {
    "sklearn",
    "torch._inductor.compile_fx",
    "torchao.quantization.pt2e.quantizer",
    "transformers",
    "typer",
}

LOADED = """
import json, sys
import torch
already = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - already)))
"""


def loaded(run_python: RunPython, statement: str) -> set[str]:
    """Return the modules that a statement loads, beyond torch."""
    result = run_python(LOADED.replace("{statement}", statement))
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "package", ["versatil_passes", "versatil_core", "versatil_x86", "versatil_arm"]
)
def test_import_is_cheap(run_python: RunPython, package: str) -> None:
    assert loaded(run_python, f"import {package}") & EXPENSIVE == set()


def test_an_expensive_import_is_noticed(run_python: RunPython) -> None:
    assert "typer" in loaded(run_python, "import typer") & EXPENSIVE


def test_listing_backends_imports_none(run_python: RunPython) -> None:
    statement = "import versatil_core; assert versatil_core.installed_backends()"

    assert {"versatil_x86", "versatil_arm"} & loaded(run_python, statement) == set()
