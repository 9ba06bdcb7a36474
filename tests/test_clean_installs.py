"""Each package installs alone, beside a distribution that owns the name ``versatil``.

The environments hold what the packages declare to need and no more: neither
torchao nor a sibling nor pytest can be borrowed from the environment of the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clean_environment import make_environment, run

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ROOT / "tools" / "release_smoke.py"

LIST = """
from importlib import metadata
print("\\n".join(dist.metadata["Name"] for dist in metadata.distributions()))
"""
SPECS = """
import sys
from importlib.util import find_spec
print("\\n".join(name for name in sys.argv[1:] if find_spec(name)))
"""
BESIDE_THE_NAMESAKE = """
import sys, {module}
for name in {module}.__all__:
    getattr({module}, name)
assert "versatil" not in sys.modules
print("ours was imported without it,", flush=True)
import versatil   # it was there to be imported: this ends the program
"""


@dataclass(frozen=True)
class Install:
    """What is installed of ours, and what must be missing then."""

    package: str
    needs: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


INSTALLS = [
    Install("versatil-passes", [], ["torchao", "versatil_core", "versatil_x86", "versatil_arm"]),
    Install("versatil-core", ["versatil-passes"], ["versatil_x86", "versatil_arm"]),
    Install("versatil-x86", ["versatil-passes", "versatil-core"], ["versatil_arm"]),
    Install("versatil-arm", ["versatil-passes", "versatil-core"], ["versatil_x86"]),
]


@pytest.mark.parametrize("install", INSTALLS, ids=lambda install: install.package)
def test_a_package_installs_alone_beside_the_namesake(
    built: Path, namesake_wheel: Path, tmp_path: Path, install: Install
) -> None:
    names = [install.package, *install.needs]
    ours = [next(built.glob(f"{name.replace('-', '_')}-*.whl")) for name in names]

    python = make_environment(tmp_path / "venv", [*ours, namesake_wheel])

    present = run(python, "-c", LIST, folder=tmp_path).split()
    assert {name for name in present if name.startswith("versatil")} == {"versatil", *names}
    assert {"pytest", "pip"}.isdisjoint(present)
    assert run(python, "-c", SPECS, "torch", *install.missing, folder=tmp_path).split() == ["torch"]
    code = BESIDE_THE_NAMESAKE.format(module=install.package.replace("-", "_"))
    with pytest.raises(SystemExit, match=r"(?s)without it,.*the namesake was imported"):
        run(python, "-c", code, folder=tmp_path)


def test_a_package_needs_what_it_declares(built: Path, tmp_path: Path) -> None:
    """The sibling that versatil-core declares is on no index here, so pip refuses."""
    core = next(built.glob("versatil_core-*.whl"))

    with pytest.raises(SystemExit, match="versatil-passes"):
        make_environment(tmp_path / "venv", [core])


def test_the_namesake_satisfies_nothing(built: Path, namesake_wheel: Path, tmp_path: Path) -> None:
    core = next(built.glob("versatil_core-*.whl"))

    with pytest.raises(SystemExit, match="versatil-passes"):
        make_environment(tmp_path / "venv", [core], namesake_wheel.parent)


def test_the_packages_work_where_they_are_installed(built: Path, tmp_path: Path) -> None:
    """What a release is tried with: a model runs in int8, exactly; on Arm with Arm's kernels."""
    python = make_environment(tmp_path / "venv", sorted(built.glob("*.whl")))
    manifest = ROOT / "packages" / "versatil-core" / "public_api.txt"

    printed = run(python, SMOKE, "versatil-core", manifest, folder=tmp_path)

    assert printed.count("2 of 2 layers int8, exact") == 1
    assert printed.count("quantized, not run on") == 1
