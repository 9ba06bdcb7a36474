"""The same sources give the same bytes: in another folder, at another time, from an sdist."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from wheels import build_package

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["versatil-passes", "versatil-core", "versatil-x86", "versatil-arm"]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Let new files have other permissions for a while."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def contents(folder: Path, package: str) -> dict[str, bytes]:
    """Return what was built of a package, by file name."""
    return {path.name: path.read_bytes() for path in folder.glob(f"{package.replace('-', '_')}-*")}


def copy_as_somebody_else(package: str, folder: Path) -> Path:
    """Copy a package as another checkout has it: dates, permissions, what tools leave behind."""
    shutil.copy(ROOT / ".gitignore", folder)
    source = folder / "packages" / package
    shutil.copytree(ROOT / "packages" / package, source)
    leftovers = [
        "src/__pycache__/a.pyc",
        "tests/__pycache__/a.pyc",
        "dist/a.whl",
        "src/.mypy_cache/a",
    ]
    for name in leftovers:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"left behind")
    for path in source.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return source


@pytest.mark.parametrize("package", PACKAGES)
def test_another_checkout_gives_the_same_bytes(
    built: Path, builder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    source = copy_as_somebody_else(package, tmp_path)

    with umask(0o077):
        build_package(source, tmp_path / "dist", builder)

    assert len(contents(built, package)) == 2
    assert contents(tmp_path / "dist", package) == contents(built, package)


@pytest.mark.parametrize("package", PACKAGES)
def test_an_sdist_builds_what_the_tree_builds(
    built: Path, builder: Path, tmp_path: Path, package: str
) -> None:
    [sdist] = built.glob(f"{package.replace('-', '_')}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = (tmp_path / sdist.name.removesuffix(".tar.gz")).rename(tmp_path / package)

    build_package(source, tmp_path / "dist", builder)

    assert contents(tmp_path / "dist", package) == contents(built, package)


def test_a_changed_source_gives_other_bytes(built: Path, builder: Path, tmp_path: Path) -> None:
    """Without this, the tests above could compare nothing."""
    source = copy_as_somebody_else("versatil-x86", tmp_path)
    (source / "src" / "versatil_x86" / "settings.py").write_text("# another\n", encoding="utf-8")

    build_package(source, tmp_path / "dist", builder)

    ours = contents(built, "versatil-x86")
    theirs = contents(tmp_path / "dist", "versatil-x86")
    assert ours.keys() == theirs.keys()
    assert all(ours[name] != theirs[name] for name in ours)
