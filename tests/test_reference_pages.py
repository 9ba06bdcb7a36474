"""The reference pages list what there is, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

import versatil_core
import versatil_passes
from versatil_core.command import app

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
LOWERING = ROOT / "packages/versatil-passes/src/versatil_passes/int8_lowering.py"


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


def reasons_in_the_source() -> list[str]:
    """Return every text with which the lowering declines a layer; what it fills in is "…"."""
    calls = [
        node.args[0]
        for node in ast.walk(ast.parse(LOWERING.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_Declined"
    ]
    # A name stands for a text that another function made.
    texts = [call for call in calls if not isinstance(call, ast.Name)]
    return [re.sub(r"{.*?}", "…", ast.unparse(text).lstrip("f")[1:-1]) for text in texts]


def test_every_reason_for_float_is_explained() -> None:
    page = ROOT / "docs" / "how-to" / "debug-a-layer-that-stays-float.md"
    table = page.read_text(encoding="utf-8").partition("## What the reasons mean")[2]
    explained = [
        re.escape(reason.rstrip("… ")).replace("…", ".*")
        for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for reason in re.findall(r"`([^`]+)`", cell)
    ]
    found = reasons_in_the_source()

    assert found, f"no reason found in {LOWERING.name}"
    for reason in found:
        assert any(re.match(start, reason) for start in explained), reason
