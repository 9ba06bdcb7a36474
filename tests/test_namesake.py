"""A third-party distribution owns the package ``versatil``; both can be installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunPython


@pytest.fixture
def namesake(tmp_path: Path) -> Path:
    """Return a folder with a regular package of that name, which must not be run."""
    package = tmp_path / "elsewhere" / "versatil"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the namesake was imported')\n")
    return package.parent


def test_the_namesake_is_in_the_way(run_python: RunPython, namesake: Path) -> None:
    result = run_python("import versatil", path=namesake, check=False)

    assert "the namesake was imported" in result.stderr


@pytest.mark.parametrize(
    "package", ["versatil_passes", "versatil_core", "versatil_x86", "versatil_arm"]
)
def test_we_never_import_the_namesake(run_python: RunPython, namesake: Path, package: str) -> None:
    code = f"import {package}, sys; assert 'versatil' not in sys.modules"

    run_python(code, path=namesake)


@pytest.mark.parametrize("name", ["x86_inductor", "arm_inductor"])
def test_backends_are_found_beside_the_namesake(
    run_python: RunPython, namesake: Path, name: str
) -> None:
    code = f"import versatil_core; assert versatil_core.load_backend({name!r})"

    run_python(code, path=namesake)
