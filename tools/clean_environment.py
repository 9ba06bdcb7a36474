"""Make virtual environments that hold what is asked for, and what that declares to need.

Third-party distributions are linked from the running environment, so an
environment takes no download and no copy of torch. Nothing else of the running
environment can be seen from within: what a package forgot to declare is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release_state import is_ours, our_wheels, wheel_requires


def make_environment(
    folder: Path, wheels: Iterable[Path], index: Path | None = None, names: Iterable[str] = ()
) -> Path:
    """Make an environment, link the third-party needs of wheels, and install the wheels.

    Args:
        folder: Where to make it.
        wheels: What to install, by path.
        index: Folder of wheels for those siblings that are not given by path.
        names: What else to install, from that folder.

    Returns:
        Its interpreter.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    given = list(wheels)
    seen = [*given, *(our_wheels(index) if index else ())]
    link(folder, (need for wheel in seen for need in wheel_requires(wheel)))
    # Siblings come from the folder; everything else has to be there, or pip fails.
    find = ["--find-links", str(index)] if index else []
    pip(python, "install", "--no-index", "--no-compile", *find, *map(str, given), *names)
    pip(python, "check")
    return python


def link(folder: Path, requirements: Iterable[Requirement]) -> None:
    """Link third-party distributions, and all that they need, into an environment."""
    base = {"base": str(folder), "platbase": str(folder)}
    target = Path(sysconfig.get_path("purelib", "venv", base))
    for name in third_parties(requirements):
        distribution = metadata.distribution(name)
        parts = {Path(file).parts[0] for file in distribution.files or ()}
        for part in parts - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(part)))
            if not (target / part).exists():
                (target / part).symlink_to(source.resolve())


def third_parties(requirements: Iterable[Requirement]) -> set[str]:
    """Return the names of all third-party distributions that the requirements lead to."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [(need, frozenset({""})) for need in requirements]
    while waiting:
        need, extras = waiting.pop()
        asked = (canonicalize_name(need.name), frozenset({"", *need.extras}))
        if asked in found or is_ours(need.name) or not is_wanted(need, extras):
            continue
        found.add(asked)
        waiting += [(Requirement(line), asked[1]) for line in requires(need.name)]
    return {name for name, _ in found}


def is_wanted(need: Requirement, extras: Iterable[str]) -> bool:
    """Whether a requirement applies here, when these extras are asked for."""
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)


def requires(name: str) -> list[str]:
    """Return what an installed distribution declares to need."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"{name} is not installed here: use the environment of `hatch run`")


def pip(python: Path, *arguments: str) -> None:
    """Run this environment's pip for another interpreter; end the program if it fails.

    No variable and no configuration file of the user can add an index to it.
    """
    command = [sys.executable, "-m", "pip", "--isolated", "--python", str(python), *arguments]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, check=False, env=outside, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"pip {arguments[0]} failed:\n{(result.stdout + result.stderr).strip()}")


def run(python: Path, *arguments: str | Path, folder: Path) -> str:
    """Run an interpreter away from the sources; return what it prints, or end the program."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(python), *map(str, arguments)],
        cwd=folder,
        env=outside,
        check=False,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        sys.exit(
            f"{(result.stdout + result.stderr).strip()}\n{Path(str(arguments[0])).name} failed"
        )
    return result.stdout
