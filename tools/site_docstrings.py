"""Lets the documentation site show our docstrings, which say a few things in Sphinx's words.

An extension of griffe, which mkdocs.yml names. It changes what is shown, never a file:

* a role such as ``:func:`~versatil_core.save``` becomes a link of mkdocstrings, but ``:attr:``
  and ``:mod:`` become code: attributes are lines of a list, and modules have no page;
* ``Example:`` becomes ``Examples:``, the only spelling that griffe takes for doctests;
* a line ``::``, which announces literal text, goes: indented text is literal in Markdown;
* ``__init__`` says nothing of its own: it is described in its class.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import griffe

_ROLE = re.compile(r":(?P<kind>attr|class|data|func|meth|mod):`(?P<short>~?)(?P<path>[\w.]+)`")
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_LITERAL = re.compile(r"^ *::\n\n", re.MULTILINE)


def as_markdown(docstring: str, definition_of: Callable[[str], str]) -> str:
    """Return a docstring in the form that griffe and mkdocstrings read.

    Args:
        docstring: As it stands in the source.
        definition_of: From the path in a role to where the object is defined.
    """

    def link(role: re.Match[str]) -> str:
        shown = role["path"].rpartition(".")[2] if role["short"] else role["path"]
        if role["kind"] in {"attr", "mod"}:
            return f"`{shown}`"
        return f"[`{shown}`][{definition_of(role['path'])}]"

    linked = _ROLE.sub(link, docstring)
    return _LITERAL.sub("", _EXAMPLE.sub(r"\1Examples:", linked))


class MarkdownDocstrings(griffe.Extension):
    """Rewrites each docstring once its package is loaded."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        if obj.name == "__init__":
            obj.docstring = None
        if obj.docstring is None:
            return

        def definition_of(path: str) -> str:
            # `versatil_core.quantize` is a module, too, which hides the function from griffe.
            package, _, name = path.rpartition(".")
            package = package or obj.package.name
            if package not in loader.modules_collection:
                return path
            return loader.modules_collection[package].imports.get(name, path)

        obj.docstring.value = as_markdown(obj.docstring.value, definition_of)
