"""The reference pages list what there is, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import typer.main

import versatil_core
import versatil_passes
from versatil_core.command import app

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
PASSES = ROOT / "packages/versatil-passes/src/versatil_passes"
# Functions that say why a layer stays float; the lowering passes that on, as a name.
REASONS_OF_OTHERS = {
    "onednn_geometry.py": ["wrong_for_some_size"],
    "float_layers.py": ["conv_geometry"],
    "int8_embedding.py": ["float_table_reason", "int8_table", "_unusable", "_bag_reason"],
}


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
    declined = [
        node.args[0]
        for node in syntax_of("int8_lowering.py")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_Declined"
    ]
    names = [value for value in declined if isinstance(value, ast.Name)]
    assert len(names) == len(REASONS_OF_OTHERS), "see who makes the text, and name it above"
    returned = [
        value
        for module, functions in REASONS_OF_OTHERS.items()
        for found in syntax_of(module)
        if isinstance(found, ast.FunctionDef) and found.name in functions
        for node in ast.walk(found)
        if isinstance(node, (ast.Return, ast.Yield))
        for value in (node.value.values if isinstance(node.value, ast.BoolOp) else [node.value])
    ]
    texts = [value for value in (*declined, *returned) if is_text(value)]
    return [re.sub(r"{.*?}", "…", ast.literal_eval(ast.unparse(t).lstrip("f"))) for t in texts]


def syntax_of(module: str) -> Iterator[ast.AST]:
    """Yield every node of a module of versatil_passes."""
    return ast.walk(ast.parse((PASSES / module).read_text(encoding="utf-8")))


def is_text(value: ast.expr | None) -> TypeGuard[ast.expr]:
    """Whether an expression is a string, with or without something to fill in."""
    is_string = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return is_string or isinstance(value, ast.JoinedStr)


def test_every_reason_for_float_is_explained() -> None:
    page = ROOT / "docs" / "how-to" / "debug-a-layer-that-stays-float.md"
    table = page.read_text(encoding="utf-8").partition("## What the reasons mean")[2]
    explained = [
        re.escape(reason.rstrip("… ")).replace("…", ".*")
        for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for reason in re.findall(r"`([^`]+)`", cell)
    ]
    found = reasons_in_the_source()

    for known in (
        *("its bias is", "its width is dynamic", "padding='same' needs"),
        *("its table is not quantized", "its table has zero_point", "its indices have"),
    ):
        assert any(reason.startswith(known) for reason in found), known
    for reason in found:
        assert any(re.match(start, reason) for start in explained), reason
