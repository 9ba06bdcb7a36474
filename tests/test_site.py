"""What has to be true before the site is built: its pages, its reference, its docstrings.

The build itself, which checks every link, is `tox run -e docs`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import griffe
import pytest

import versatil_arm
import versatil_core
import versatil_core.testing
import versatil_passes
import versatil_x86

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
PACKAGES = [versatil_passes, versatil_core, versatil_x86, versatil_arm]
MODULES = [*PACKAGES, versatil_core.testing]  # what has a reference page


def name_of(module: ModuleType) -> str:
    """Return the name of a module's page, for a package that of its distribution."""
    return module.__name__.replace("_", "-")


def directives(module: ModuleType) -> list[str]:
    """Return what a reference page has mkdocstrings show."""
    page = DOCS / "reference" / f"{name_of(module)}.md"
    return re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def resolve(path: str) -> object:
    """Import the module of a dotted path and return the object that it defines there."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_page_is_in_the_navigation() -> None:
    _, _, nav = CONFIG.partition("\nnav:\n")
    listed = re.findall(r"^ +- .*?([\w./-]+\.md)$", nav, re.MULTILINE)
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]

    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_reference_page_shows_every_public_name(module: ModuleType) -> None:
    public = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    package, _, _ = module.__name__.partition(".")
    # What a package hands on from another one is on that one's page.
    own = {name for name, item in public.items() if item.__module__.startswith(package)}
    shown = directives(module)

    assert sorted(path.rpartition(".")[2] for path in shown) == sorted(own)
    for path in shown:
        assert resolve(path) is public[path.rpartition(".")[2]], path


def test_names_that_are_handed_on_have_a_page_of_their_own() -> None:
    shown = {resolve(path) for package in PACKAGES for path in directives(package)}

    for package in PACKAGES:
        for name in package.__all__:
            assert name == "__version__" or getattr(package, name) in shown, name


def test_every_package_has_its_sources_and_its_changelog_on_the_site() -> None:
    for package in PACKAGES:
        name = name_of(package)
        assert f"- packages/{name}/src\n" in CONFIG
        included = (DOCS / "changelog" / f"{name}.md").read_text(encoding="utf-8")
        assert included == f'--8<-- "packages/{name}/CHANGELOG.md"\n'


def test_the_site_asks_no_other_server() -> None:
    assert "font: false" in CONFIG
    for path in [ROOT / "mkdocs.yml", *DOCS.rglob("*.css"), *DOCS.rglob("*.svg")]:
        addresses = re.findall(r"https?://(?!www\.w3\.org/)[^\s\"']+", path.read_text("utf-8"))
        assert not addresses, f"{path.name}: {addresses}"


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_public_docstrings_are_what_the_site_can_show(module: ModuleType) -> None:
    """Sections are those that griffe knows, and each argument is described under its name."""
    for path in directives(module):
        item = resolve(path)
        text = inspect.getdoc(item)
        assert text, path
        returned = re.search(r"^Returns:\n    (.*)$", text, re.MULTILINE)
        # Up to a colon would be shown as the type.
        assert not returned or ": " not in returned[1], path
        sections = set(re.findall(r"^([A-Z]\w+):$", text, re.MULTILINE))
        assert sections <= {"Args", "Attributes", "Example", "Raises", "Returns", "Yields"}, path
        if inspect.isfunction(item):
            arguments = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
            described = re.findall(r"^    \*{0,2}(\w+):", arguments, re.MULTILINE)
            assert described == list(inspect.signature(item).parameters), path


@pytest.fixture
def as_shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, griffe.Object]:
    """Return what mkdocstrings gets to see of each object that the reference pages show."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    from site_docstrings import MarkdownDocstrings

    loader = griffe.GriffeLoader(
        search_paths=sorted(ROOT.glob("packages/*/src")),
        extensions=griffe.load_extensions(MarkdownDocstrings),
        allow_inspection=False,
    )
    for package in PACKAGES:
        loader.load(package.__name__)
    paths = [path for module in MODULES for path in directives(module)]
    return {path: loader.modules_collection[path] for path in paths}


def test_docstrings_become_markdown(as_shown: dict[str, griffe.Object]) -> None:
    for path, item in as_shown.items():
        for shown in [item, *item.members.values()]:
            text = shown.docstring.value if shown.docstring else ""
            assert not re.search(r":\w+:`|^ *(::|Example:)$", text, re.MULTILINE), path


def test_roles_lead_to_where_the_object_is_defined(as_shown: dict[str, griffe.Object]) -> None:
    def links(path: str) -> set[str]:
        docstring = as_shown[path].docstring
        return set(re.findall(r"\[`[\w.]+`\]\[([\w.]+)\]", docstring.value if docstring else ""))

    # A full path, one of another package, and a bare name.
    assert "versatil_core.targets.QuantizationTarget" in links("versatil_core.quantize.quantize")
    assert "versatil_passes.lowering_record.LoweringRecord" in links("versatil_core.lower.lower")
    assert "versatil_core.prepare.prepare" in links("versatil_core.convert.convert")
