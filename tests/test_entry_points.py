"""The names under which the packages can be found exist, and lead somewhere."""

from __future__ import annotations

import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunPython


def test_backend_is_registered_under_its_own_name() -> None:
    (entry,) = metadata.entry_points(group="versatil.backends")

    assert entry.name == entry.load().name == "x86_inductor"


def test_dynamo_backend_is_registered() -> None:
    entries = metadata.entry_points(group="torch_dynamo_backends", name="versatil_x86")

    assert [callable(entry.load()) for entry in entries] == [True]


def test_dynamo_finds_the_backend_without_an_import(run_python: RunPython) -> None:
    run_python("import torch; assert 'versatil_x86' in torch.compiler.list_backends()")


def test_command_runs() -> None:
    command = Path(sysconfig.get_path("scripts")) / "versatil"

    result = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)

    assert "quantize" in result.stdout
