"""The reference pages list what there is, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

import versatil_core
import versatil_passes
from versatil_core.command import app

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"


def subclasses(cls: type[Exception]) -> Iterator[type[Exception]]:
    """Yield a class and everything that derives from it."""
    yield cls
    for child in cls.__subclasses__():
        yield from subclasses(child)


def test_command_page_lists_every_command_and_option() -> None:
    page = (REFERENCE / "command.md").read_text(encoding="utf-8")
    command = typer.main.get_command(app)

    for name, subcommand in command.commands.items():  # type: ignore[attr-defined]
        section = re.search(rf"^## `versatil {name}.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert section, name
        for parameter in subcommand.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--verbose":
                    assert option in section.group(), f"{name} {option}"


def test_errors_page_lists_every_public_error_with_its_base() -> None:
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| (?:`(\w+)` )?\|", page, re.MULTILINE))
    public = {*versatil_passes.__all__, *versatil_core.__all__}

    expected = {}
    for error in subclasses(versatil_passes.VersatilError):
        if error.__name__ in public:
            own = [base for base in error.__bases__ if base.__module__ == "builtins"]
            expected[error.__name__] = own[0].__name__ if own else ""

    assert listed == expected
