"""Wheels and sdists hold the files of their package and nothing else."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from release_state import about_version, git

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["versatil-passes", "versatil-core", "versatil-x86", "versatil-arm"]


def names_in(folder: zipfile.Path) -> set[str]:
    """Return the names of all files in a wheel."""
    return {name for name in folder.root.namelist() if not name.endswith("/")}


def source_names(package: str, folder: str) -> set[str]:
    """Return what git has in a folder of a package, and what it would take, by its path there."""
    options = ["-z", "--cached", "--others", "--exclude-standard"]
    listing = git(ROOT / "packages" / package, "ls-files", *options, folder)
    names = {name for name in listing.split("\0") if name}
    # A file that was deleted stays listed until that is committed.
    return {name for name in names if (ROOT / "packages" / package / name).is_file()}


def stem(package: str) -> str:
    """Return ``name-version`` as files of a distribution begin."""
    return f"{package.replace('-', '_')}-{about_version(ROOT / 'packages' / package)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_what_the_package_needs(wheels: dict[str, zipfile.Path], package: str) -> None:
    extra = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}
    if package != "versatil-passes":
        extra.add("entry_points.txt")

    modules = {name.removeprefix("src/") for name in source_names(package, "src")}
    expected = modules | {f"{stem(package)}.dist-info/{name}" for name in extra}

    assert f"{package.replace('-', '_')}/__init__.py" in modules
    assert names_in(wheels[package]) == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_sdist_holds_sources_and_tests(built: Path, package: str) -> None:
    about_it = {"PKG-INFO", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    # hatchling adds the rules by which it leaves files out, so that they hold in the sdist, too.
    extra = about_it | {"public_api.txt", ".gitignore"}
    expected = source_names(package, "src") | source_names(package, "tests") | extra

    with tarfile.open(built / f"{stem(package)}.tar.gz") as archive:
        members = archive.getmembers()

    assert {member.name for member in members if member.isfile()} == {
        f"{stem(package)}/{name}" for name in expected
    }
    assert all(member.isfile() or member.isdir() for member in members)


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
