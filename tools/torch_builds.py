"""Keep builds of torch that several test environments share.

On Linux the index serves CUDA builds, which take 3 GB to fetch and 5 to 7 GB on disk. One is
installed once, into a folder of its own, and each environment that tests with it reads it
through a ``.pth`` file; everything else an environment installs for itself.

Usage::

    python tools/torch_builds.py FOLDER --remove
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from wheels import pip

# Fetched and unpacked side by side, and half as much again for what else a run writes.
CUDA_BUILD_GB = 15
CPU_BUILD_GB = 3
UNFINISHED = "unfinished-"
# In each environment that uses a build.
LINK = "torch_build.pth"


class NoRoomError(Exception):
    """There is too little free disk for another build of torch."""


@dataclass(frozen=True)
class Pair:
    """A torch and the torchao that goes with it.

    Attributes:
        torch: Version of torch, such as ``"2.13.0"``.
        torchao: Version of torchao, such as ``"0.18.0"``.
    """

    torch: str
    torchao: str


def read_pair(constraints: Path) -> Pair:
    """Read the pair of one file ``tools/constraints/torch-*.txt``.

    Raises:
        ValueError: The file says something else.
    """
    lines = [line.partition("#")[0].strip() for line in constraints.read_text("utf-8").splitlines()]
    pinned = {}
    for requirement in map(Requirement, filter(None, lines)):
        pins = [pin.version for pin in requirement.specifier if pin.operator == "=="]
        pinned[requirement.name] = pins[0] if len(pins) == 1 else ""
    if set(pinned) != {"torch", "torchao"} or not all(pinned.values()):
        raise ValueError(f"{constraints}: expected torch==... and torchao==..., found {pinned}")
    return Pair(**pinned)


def provide(folder: Path, constraints: Path) -> Path:
    """Return the shared build of one torch for this Python, installed if need be.

    Args:
        folder: Where the builds are.
        constraints: The file that pins the version.

    Returns:
        The folder of the build: torch and all that it needs.

    Raises:
        NoRoomError: The disk is too full for it, even without the other builds.
    """
    build = folder / f"{sys.implementation.cache_tag}-torch-{read_pair(constraints).torch}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w", encoding="utf-8") as lock:
        # One at a time: another environment may be installing this one right now.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not build.is_dir():
            make_room(folder, CPU_BUILD_GB if has_local_cpu_build(constraints) else CUDA_BUILD_GB)
            install(constraints, build)
    return build


def install(constraints: Path, build: Path) -> None:
    """Install a torch and all that it needs into a folder of its own."""
    print(f"{build.name}: installing it for all environments that test with it", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=build.parent, prefix=UNFINISHED) as unfinished:
        target = Path(unfinished) / "build"
        # Not into pip's cache: 3 GB of each version, for nothing.
        pip("install", "--no-cache-dir", "--target", target, "-c", constraints, "torch")
        target.rename(build)


def has_local_cpu_build(constraints: Path) -> bool:
    """Whether ``PIP_FIND_LINKS`` has a CPU build. What the index serves, pip tells after fetching it."""
    report = run_pip(
        *("install", "--dry-run", "--no-index", "--no-deps", "--ignore-installed"),
        *("--report", "-", "-c", constraints, "torch"),
    )
    found = [] if report.returncode else json.loads(report.stdout)["install"]
    return any(item["metadata"]["version"].endswith("+cpu") for item in found)


def make_room(folder: Path, wanted_gb: float) -> None:
    """Delete builds if there is less disk free than wanted.

    Raises:
        NoRoomError: There is less all the same.
    """
    if free_gb(folder) < wanted_gb:
        remove_builds(folder)
    if free_gb(folder) < wanted_gb:
        raise NoRoomError(
            f"{free_gb(folder):.1f} GB are free in {folder}, and this build of torch is installed "
            f"only where {wanted_gb} GB are. Free some, or let PIP_FIND_LINKS lead to a CPU build, "
            f"which takes {CPU_BUILD_GB} GB"
        )


def free_gb(folder: Path) -> float:
    """Return the free disk that a folder can use, in GB (10**9 bytes)."""
    return shutil.disk_usage(folder).free / 1e9


def remove_builds(folder: Path) -> None:
    """Delete all builds; what is left of one that was interrupted, too."""
    for build in [*folder.glob("*-torch-*/torch"), *folder.glob(f"{UNFINISHED}*/")]:
        shutil.rmtree(build.parent if build.name == "torch" else build)


def link(build: Path) -> None:
    """Let the running environment read a build, and no other."""
    Path(sysconfig.get_path("purelib"), LINK).write_text(f"{build}\n", encoding="utf-8")


def run_pip(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pip of this environment."""
    command = [sys.executable, "-m", "pip", "--quiet", *map(str, arguments)]
    environment = os.environ | {"PIP_NO_INPUT": "1"}
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


def main() -> None:
    """Delete the builds of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--remove", action="store_true", required=True, help="delete all builds")
    remove_builds(parser.parse_args().folder)


if __name__ == "__main__":
    main()
