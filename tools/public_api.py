"""Describe the public names of a package, one a line, with the names of parameters.

Usage::

    python tools/public_api.py PACKAGE      # print the description
    python tools/public_api.py --write      # write packages/*/public_api.txt
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def describe(package: str) -> str:
    """Return the description of one package: its ``__all__``, sorted.

    Args:
        package: A distribution of this workspace, such as ``versatil-core``.
    """
    module = importlib.import_module(package.replace("-", "_"))
    lines: list[str] = []
    for name in sorted(module.__all__):
        lines += describe_name(name, getattr(module, name))
    return "\n".join(lines) + "\n"


def describe_name(name: str, value: object) -> Iterator[str]:
    """Yield the lines for one public name: itself, and the members of a class."""
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}({bases}){parameters(value)}"
        yield from sorted(f"    {name}.{line}" for line in members(value))
    elif callable(value):
        yield f"{name}{parameters(value)}"
    else:
        yield name


def members(cls: type) -> Iterator[str]:
    """Yield the public members that our own classes define or inherit."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("versatil_")]
    names = {name for base in ours for name in [*vars(base), *inspect.get_annotations(base)]}
    for name in names:
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(cls, name, None)
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        yield f"{name}{parameters(value)}" if inspect.isfunction(value) else name


def parameters(value: Any) -> str:
    """Return a signature without annotations, which differ between Python versions."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    plain = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def main() -> None:
    """Print the description of one package, or write all of them."""
    if sys.argv[1:] == ["--write"]:
        for project in sorted(ROOT.glob("packages/*/pyproject.toml")):
            target = project.with_name("public_api.txt")
            target.write_text(describe(project.parent.name), encoding="utf-8")
            print(target.relative_to(ROOT))
    elif len(sys.argv) == 2:
        print(describe(sys.argv[1]), end="")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
