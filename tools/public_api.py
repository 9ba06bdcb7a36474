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
        yield f"class {name}" + (f"({bases})" if bases else "")
        if has_own_constructor(value):
            yield f"    {name}{parameters(value)}"
        yield from sorted(f"    {name}.{line}" for line in members(value))
    elif callable(value):
        yield f"{name}{parameters(value)}"
    else:
        yield name


def has_own_constructor(cls: type) -> bool:
    """Whether one of our classes says what ``cls`` is made from."""
    return any("__init__" in vars(base) for base in our_bases(cls))


def our_bases(cls: type) -> list[type]:
    """Return ``cls`` and its bases, as far as they are ours."""
    return [base for base in cls.__mro__ if base.__module__.startswith("versatil_")]


def members(cls: type) -> Iterator[str]:
    """Yield the public members that our own classes define or inherit."""
    names = {
        name for base in our_bases(cls) for name in [*vars(base), *inspect.get_annotations(base)]
    }
    for name in names:
        if name.startswith("_"):
            continue
        value = inspect.getattr_static(cls, name, None)
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        yield f"{name}{parameters(value)}" if inspect.isfunction(value) else name


def parameters(value: Any) -> str:
    """Return a signature without annotations, which differ between Python versions."""
    signature = inspect.signature(value)
    plain = [
        parameter.replace(annotation=parameter.empty, default=stable(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def stable(default: object) -> object:
    """Return a set as a sorted list: its own order differs between processes."""
    return sorted(default) if isinstance(default, frozenset) else default


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
