"""Run one cell of the matrix: the tests of one package, on wheels, with one torch.

Usage::

    python tools/matrix_cell.py py311-x86-torch29 --work DIR -- PYTEST ARGUMENTS

The environment that runs it gets torch from a build that it shares with others
(tools/torch_builds.py), and everything else for itself. What came out is written to
``DIR/results`` (tools/run_record.py), which tools/compatibility.py makes a page of.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from packaging.requirements import Requirement
from packaging.version import Version

import torch_builds
import wheels
from torch_builds import NoRoomError
from whole_files import write_whole

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = sorted(
    (ROOT / "tools" / "constraints").glob("torch-*.txt"),
    key=lambda path: Version(path.stem.removeprefix("torch-")),
)
# The file of the pair, by the end of an environment's name.
VERSIONS = {
    **{path.stem.replace("-", "").replace(".", ""): path for path in CONSTRAINTS},
    "oldest": CONSTRAINTS[0],
    "latest": CONSTRAINTS[-1],
}
NAMES = [package.name for package in wheels.PACKAGES]


@dataclass(frozen=True)
class Cell:
    """What an environment's name says: ``py311-x86-torch29``, ``py312-core-oldest``.

    Attributes:
        name: The environment's name.
        package: The package whose tests run.
        constraints: The file that pins torch and torchao.
        is_oldest: Whether every dependency is the oldest that is promised.
        may_be_left_out: Whether a disk without room for this torch is no failure.
    """

    name: str
    package: str
    constraints: Path
    is_oldest: bool
    may_be_left_out: bool

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a name.

        Raises:
            ValueError: There is no such package or no such torch.
        """
        parts = name.split("-")
        _, short, version = parts if len(parts) == 3 else ("", "", "")
        package = f"versatil-{short}"
        if package not in NAMES or version not in VERSIONS:
            raise ValueError(f"{name}: the packages are {NAMES}, the versions {list(VERSIONS)}")
        is_end = version in {"oldest", "latest"}
        return cls(name, package, VERSIONS[version], version == "oldest", is_end)


def requirements(package: str) -> dict[str, Requirement]:
    """Return what ``pyproject.toml`` of a package requires, by name."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    required = map(Requirement, tomllib.loads(text)["project"]["dependencies"])
    return {requirement.name: requirement for requirement in required}


def with_siblings(package: str) -> list[str]:
    """Return the packages of ours that one needs, and itself, in the order of the arrows."""
    needed = [name for name in requirements(package) if name in NAMES]
    return [*dict.fromkeys(name for sibling in needed for name in with_siblings(sibling)), package]


def floors(packages: Sequence[str]) -> list[str]:
    """Return pins to the oldest version that is promised of each dependency.

    Of torch and torchao the pair says it; siblings are the wheels under test.
    """
    given = {"torch", "torchao", *NAMES}
    promised = [
        requirement for package in packages for requirement in requirements(package).values()
    ]
    return sorted(
        f"{requirement.name}=={pin.version}"
        for requirement in {str(each): each for each in promised}.values()
        for pin in requirement.specifier
        if requirement.name not in given and pin.operator in {">=", "=="}
    )


def prepare(cell: Cell, work: Path) -> None:
    """Bring torch, our wheels and what they need into the running environment.

    Raises:
        NoRoomError: The disk has no room for this torch.
    """
    torch_builds.link(torch_builds.provide(work / "torch", cell.constraints))
    needed = with_siblings(cell.package)
    constraints = [str(cell.constraints)]
    if cell.is_oldest:
        oldest = work / f"{cell.name}.txt"
        write_whole(oldest, "\n".join([*floors(needed), ""]))
        constraints.append(str(oldest))
    wheels.install(wheels.build(work / "wheelhouse"), needed, constraints)


def record_of(cell: Cell, work: Path) -> Path:
    """Return where the record of a run is written."""
    return work / "results" / f"{cell.name}.json"


def run_tests(cell: Cell, work: Path, arguments: Sequence[str]) -> int:
    """Run pytest and return its exit code."""
    # Most of the time is compiling, one file after the other.
    parallel = ["-n", "logical", "--maxprocesses", "4", "--dist", "worksteal"]
    chosen = [f"packages/{cell.package}/tests", *(arguments or parallel)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tools"),
        "VERSATIL_RUN_RECORD": str(record_of(cell, work)),
        "VERSATIL_RUN_PACKAGE": cell.package,
    }
    command = [sys.executable, "-m", "pytest", "-p", "run_record", *chosen]
    return subprocess.run(command, check=False, env=environment, cwd=ROOT).returncode


def main() -> int:
    """Parse the command line and do what it says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the environment")
    parser.add_argument("--work", type=Path, required=True, help="for builds, wheels and results")
    # argparse would keep a "--" that nothing follows.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end])
    try:
        cell, work = Cell.parse(options.name), options.work.resolve()
    except ValueError as error:
        parser.error(str(error))
    # What an earlier run showed is no result of this one.
    record_of(cell, work).unlink(missing_ok=True)
    try:
        prepare(cell, work)
    except NoRoomError as error:
        if not cell.may_be_left_out:
            sys.exit(f"{cell.name} is not run: {error}")
        print("=" * 100, f"LEFT OUT, NOT TESTED: {cell.name}: {error}", "=" * 100, sep="\n")
        return 0
    return run_tests(cell, work, sys.argv[end + 1 :])


if __name__ == "__main__":
    sys.exit(main())
