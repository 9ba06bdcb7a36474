"""The names under which the packages can be found exist, and lead somewhere."""

from __future__ import annotations

import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunPython


DYNAMO_NAMES = ["versatil_x86", "versatil_arm"]


def test_backends_are_registered_under_their_own_names() -> None:
    entries = metadata.entry_points(group="versatil.backends")

    assert sorted(entry.name for entry in entries) == ["arm_inductor", "x86_inductor"]
    for entry in entries:
        assert entry.load().name == entry.name


@pytest.mark.parametrize("name", DYNAMO_NAMES)
def test_dynamo_backend_is_registered(name: str) -> None:
    entries = metadata.entry_points(group="torch_dynamo_backends", name=name)

    assert [callable(entry.load()) for entry in entries] == [True]


@pytest.mark.parametrize("name", DYNAMO_NAMES)
def test_dynamo_finds_the_backend_without_an_import(run_python: RunPython, name: str) -> None:
    run_python(f"import torch; assert {name!r} in torch.compiler.list_backends()")


def test_command_runs() -> None:
    command = Path(sysconfig.get_path("scripts")) / "versatil"

    result = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)

    assert "quantize" in result.stdout
