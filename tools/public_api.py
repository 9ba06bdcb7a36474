"""Describe the public names of a package, one a line, with the names of parameters.

Two descriptions of a package tell what the newer one breaks for users of the older
one: :func:`incompatible_changes`.

Usage::

    python tools/public_api.py PACKAGE      # print the description
    python tools/public_api.py --write      # write packages/*/public_api.txt
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from whole_files import write_whole

ROOT = Path(__file__).resolve().parent.parent
# What is public below the top: a name, or a module with its ``__all__``. Backends of others need it.
PUBLIC_BELOW = {
    "versatil-passes": ("float_layers.conv_groups",),
    "versatil-core": (
        "inductor_settings.INT8_SETTINGS",
        "layer_quantizer.LayerQuantizer",
        "testing",
    ),
}
# Kinds of parameters, as inspect names them.
BY_POSITION = {"POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD"}
BY_NAME = {"POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"}
REST, KEYWORD_REST = {"VAR_POSITIONAL"}, {"VAR_KEYWORD"}


def describe(package: str) -> str:
    """Return the description of one package: its ``__all__``, and what is public below, sorted.

    Args:
        package: A distribution of this workspace, such as ``versatil-core``.
    """
    found = public_values(package.replace("-", "_"), PUBLIC_BELOW.get(package, ()))
    lines = (line for name in sorted(found) for line in describe_name(name, found[name]))
    return "\n".join(lines) + "\n"


def public_values(module_name: str, below: Iterable[str]) -> dict[str, object]:
    """Return the public names of a module, such as ``testing.assert_int8``, and their values."""
    module = importlib.import_module(module_name)
    found = {name: getattr(module, name) for name in module.__all__}
    for entry in below:
        submodule, _, name = entry.partition(".")
        inner = importlib.import_module(f"{module_name}.{submodule}")
        names = [name] if name else inner.__all__
        found |= {f"{submodule}.{name}": getattr(inner, name) for name in names}
    return found


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
        # The tests of a conformance are run, not called: one may go.
        if name.startswith(("_", "test_")):
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
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    # The address of a function differs between processes.
    return re.sub(r"<function .*? at 0x[0-9a-f]+>", "<function>", text)


def stable(default: object) -> object:
    """Return a set as a sorted list: its own order differs between processes."""
    return sorted(default) if isinstance(default, frozenset) else default


def incompatible_changes(old: str, new: str) -> list[str]:
    """Return what breaks users of the old description, a sentence for each change.

    Names may be added, and so may parameters with a default and base classes. A
    changed default is no change of the interface; it belongs in the changelog.

    Args:
        old: A description, as :func:`describe` returns it.
        new: A later one of the same package.
    """
    found: list[str] = []
    now = _by_name(new)
    for name, before in _by_name(old).items():
        after = now.get(name)
        if after is None:
            found.append(f"{name} was removed")
        elif before.kind != after.kind:
            found.append(f"{name} was a {before.kind} and is a {after.kind}")
        else:
            lost = [base for base in before.bases if base not in after.bases]
            found += [f"{name} is no {base} any more" for base in lost]
            found += [f"{name}: {what}" for what in _broken_calls(before.takes, after.takes)]
    return found


@dataclass(frozen=True)
class _Name:
    """One public name: what it is, its base classes, and what a call of it takes."""

    kind: str
    bases: tuple[str, ...] = ()
    takes: inspect.Signature = field(default_factory=inspect.Signature)


def _by_name(description: str) -> dict[str, _Name]:
    """Read a description; a class and its constructor are one name."""
    found: dict[str, _Name] = {}
    for line in description.splitlines():
        name, bracket, inner = line.strip().removeprefix("class ").partition("(")
        if line.startswith("class "):
            bases = tuple(inner.removesuffix(")").split(", ")) if bracket else ()
            # What a class takes that leaves it to its bases is not known: anything.
            found[name] = _Name("class", bases, _signature("(*_, **__)" if bases else "()"))
        elif name in found:
            found[name] = replace(found[name], takes=_signature(bracket + inner))
        elif bracket:
            found[name] = _Name("function", (), _signature(bracket + inner))
        else:
            found[name] = _Name("value")
    return found


def _signature(text: str) -> inspect.Signature:
    """Read a signature of a description; every default in it becomes ``...``."""
    # The text of a default need not be Python, such as <factory>.
    tree = ast.parse(f"lambda {re.sub('<[^<>]*>', '...', text)[1:-1]}: ...", mode="eval")
    assert isinstance(tree.body, ast.Lambda)
    taken, default = tree.body.args, ast.Constant(...)
    taken.defaults = [default for _ in taken.defaults]
    taken.kw_defaults = [given and default for given in taken.kw_defaults]
    code = compile(ast.fix_missing_locations(tree), "<public API>", "eval")
    return inspect.signature(eval(code))  # noqa: S307 -- names alone are left of the text


def _broken_calls(before: inspect.Signature, after: inspect.Signature) -> Iterator[str]:
    """Yield why a call that ``before`` accepts may fail with ``after``."""
    old, new = before.parameters, after.parameters
    places, new_places = _names(before, BY_POSITION), _names(after, BY_POSITION)
    keywords, new_keywords = _names(before, BY_NAME), _names(after, BY_NAME)
    for name in dict.fromkeys(places + keywords):
        if name not in new:
            yield f"{name} was removed"
        elif name in keywords and name not in new_keywords:
            yield f"{name} can't be given by name any more"
        elif name in places and name not in new_places:
            yield f"{name} can't be given by position any more"
        elif name in places and places.index(name) != new_places.index(name):
            yield f"{name} is at another position"
    for name in dict.fromkeys(new_places + new_keywords):
        # The name of the rest, as in *args, is none that anybody gives.
        was_given = name in places or name in keywords
        was_required = was_given and old[name].default is inspect.Parameter.empty
        if new[name].default is inspect.Parameter.empty and not was_required:
            yield f"{name} has to be given now"
    if _names(before, REST) and (not _names(after, REST) or places != new_places):
        yield "it takes fewer positional arguments than any number"
    if _names(before, KEYWORD_REST) and (
        not _names(after, KEYWORD_REST) or not set(new_keywords) <= set(keywords)
    ):
        yield "it takes fewer names than any"


def _names(signature: inspect.Signature, kinds: set[str]) -> list[str]:
    """Return the names of the parameters of these kinds, in their order."""
    return [name for name, found in signature.parameters.items() if found.kind.name in kinds]


def main() -> None:
    """Print the description of one package, or write all of them."""
    if sys.argv[1:] == ["--write"]:
        for project in sorted(ROOT.glob("packages/*/pyproject.toml")):
            target = project.with_name("public_api.txt")
            write_whole(target, describe(project.parent.name))
            print(target.relative_to(ROOT))
    elif len(sys.argv) == 2:
        print(describe(sys.argv[1]), end="")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
