"""What the cross-package tests share: clean interpreters, what is built, and the tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RunPython = Callable[..., subprocess.CompletedProcess[str]]

# The tools are scripts, no package; some of them are tested function by function.
sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Return a function that runs code in a new interpreter, away from the sources."""

    def run(
        code: str, *, path: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ, PYTHONSAFEPATH="1")
        environment.pop("PYTHONPATH", None)
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where tools/wheels.py builds: tox's, or one for these tests."""
    given = os.environ.get("VERSATIL_WHEELHOUSE")
    return Path(given) if given else tmp_path_factory.mktemp("wheelhouse")


@pytest.fixture(scope="session")
def built(wheelhouse: Path) -> Path:
    """Return the folder with the wheel and the sdist of each package, built if need be."""
    from wheels import build

    return build(wheelhouse)


@pytest.fixture(scope="session")
def builder(wheelhouse: Path) -> Path:
    """Return the folder with what builds."""
    from wheels import find_builder

    return find_builder(wheelhouse)


@pytest.fixture(scope="session")
def wheels(built: Path) -> dict[str, zipfile.Path]:
    """Return the wheel of each package by its distribution name."""
    return {
        path.name.split("-")[0].replace("_", "-"): zipfile.Path(path)
        for path in sorted(built.glob("*.whl"))
    }


@pytest.fixture(scope="session")
def namesake_wheel(builder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of the name ``versatil``, a regular package that must not be run."""
    from wheels import build_package

    source = tmp_path_factory.mktemp("namesake") / "versatil"
    (source / "versatil").mkdir(parents=True)
    (source / "versatil" / "__init__.py").write_text(
        "raise SystemExit('the namesake was imported')"
    )
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "versatil"\nversion = "99.0"\n'
    )
    [wheel] = [
        path for path in build_package(source, source / "dist", builder) if path.suffix == ".whl"
    ]
    return wheel


@pytest.fixture(scope="session")
def released_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of this repository as it is after a release of every package."""
    from release_clone import copy_as_released

    home = tmp_path_factory.mktemp("released") / "home"
    copy_as_released(home)
    return home


@pytest.fixture
def home(released_home: Path, tmp_path: Path) -> Path:
    """Return a clone of that copy to release from; its tools release it, not this one."""
    shutil.copytree(released_home, tmp_path / "home", symlinks=True)
    return tmp_path / "home"


@pytest.fixture
def index(built: Path, namesake_wheel: Path, tmp_path: Path) -> Path:
    """Return a folder of published wheels, without versatil-arm, with the namesake."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ["passes", "core", "x86"]:
        shutil.copy(next(built.glob(f"versatil_{name}-*.whl")), folder)
    shutil.copy(namesake_wheel, folder)
    return folder
