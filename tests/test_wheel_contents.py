"""A wheel holds the modules of its package and nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


PACKAGES = ["versatil-passes", "versatil-core", "versatil-x86", "versatil-arm"]


def names_in(folder: zipfile.Path) -> set[str]:
    """Return the names of all files in a wheel."""
    return {name for name in folder.root.namelist() if not name.endswith("/")}


def module_names(package: str) -> set[str]:
    """Return the names that the modules of a package have in its wheel."""
    source = ROOT / "packages" / package / "src"
    return {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_what_the_package_needs(wheels: dict[str, zipfile.Path], package: str) -> None:
    info = f"{package.replace('-', '_')}-0.1.0.dist-info"
    extra = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}
    if package != "versatil-passes":
        extra.add("entry_points.txt")

    expected = module_names(package) | {f"{info}/{name}" for name in extra}

    assert names_in(wheels[package]) == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_says_that_it_is_typed(wheels: dict[str, zipfile.Path], package: str) -> None:
    assert f"{package.replace('-', '_')}/py.typed" in names_in(wheels[package])


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_ships_only_its_own_import_name(
    wheels: dict[str, zipfile.Path], package: str
) -> None:
    """The name ``versatil`` belongs to somebody else's package."""
    folders = {name.split("/")[0] for name in names_in(wheels[package])}

    own = package.replace("-", "_")
    assert {name for name in folders if not name.endswith(".dist-info")} == {own}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_carries_the_license(package: str) -> None:
    license_text = (ROOT / "LICENSE").read_text(encoding="utf-8")

    assert (ROOT / "packages" / package / "LICENSE").read_text(encoding="utf-8") == license_text


@pytest.mark.parametrize("package", PACKAGES)
def test_version_has_one_place(package: str) -> None:
    source = ROOT / "packages" / package / "src"

    places = [path for path in source.rglob("*.py") if "__version__ =" in path.read_text("utf-8")]

    assert places == [Path(source / package.replace("-", "_") / "__about__.py")]
