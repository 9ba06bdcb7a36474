"""What Inductor and Dynamo may rename or move is named in one module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import versatil_core

PRIVATE = ("torch._inductor", "torch._dynamo")
SOURCES = sorted(Path(versatil_core.__file__).parent.glob("*.py"))


def private_names(source: str) -> Iterator[str]:
    """Yield the parts of Inductor and Dynamo that code imports or uses."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [ast.unparse(node.args[0]).lstrip("f").strip("'")]
        yield from (name for name in names if name.startswith(PRIVATE))


@pytest.mark.parametrize(
    "code",
    [
        "import torch._inductor.config",
        "from torch._inductor import config",
        "importlib.import_module('torch._inductor.config')",
        "importlib.import_module(f'torch._inductor.fx_passes.{name}')",
        "torch._dynamo.reset()",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert [*private_names(code)]


@pytest.mark.parametrize("path", SOURCES, ids=[path.stem for path in SOURCES])
def test_private_names_are_in_one_module(path: Path) -> None:
    found = [*private_names(path.read_text(encoding="utf-8"))]

    assert bool(found) == (path.stem == "_torch_compat"), found
