"""Build the wheels and source distributions of the workspace, and install some wheels.

What tox tests is what a user would install: wheels, in an environment that
holds nothing else of ours. Three rules make that trustworthy:

* A wheelhouse is named for the content of the sources, so an environment that
  is run alone can't pick up a wheel of an older state.
* Wheels are installed by their path, so no package of the same name on an
  index can take the place of a sibling.
* There is one way to build, here, and it gives the same bytes each time: a
  release is what was tested.

Usage::

    python tools/wheels.py build --wheelhouse DIR
    python tools/wheels.py install --wheelhouse DIR [-c FILE] NAME[EXTRA] ...
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
# Exact, since its version is written into each wheel.
BUILDER = "hatchling==1.33.0"
# The date of every file in what is built: 2020-02-02, which zip archives can hold.
SOURCE_DATE_EPOCH = "1580601600"
IGNORED = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "dist"}


def source_digest() -> str:
    """Return a digest of every file that can end up in one of the wheels."""
    digest = hashlib.sha256(BUILDER.encode())
    for package in PACKAGES:
        for path in sorted(package.rglob("*")):
            if path.is_file() and not IGNORED.intersection(path.parts):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def build(wheelhouse: Path) -> Path:
    """Build the distributions of every package, unless this state has been built.

    Args:
        wheelhouse: Folder that holds the builder and one folder for each state
            of the sources; older states are deleted.

    Returns:
        The folder with the wheels and the sdists of the present state.
    """
    current = wheelhouse / source_digest()
    if current.is_dir():
        return current
    builder = find_builder(wheelhouse)
    for older in set(wheelhouse.iterdir()) - {builder}:
        shutil.rmtree(older)
    with tempfile.TemporaryDirectory(dir=wheelhouse) as unfinished:
        built = Path(unfinished) / "built"
        for package in PACKAGES:
            build_package(package, built, builder)
        built.rename(current)
    return current


def find_builder(home: Path) -> Path:
    """Return the folder below ``home`` with hatchling, installed there if need be.

    It is nobody's environment: what is tested must not see it.
    """
    builder = home / BUILDER.replace("==", "-")
    if not builder.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as unfinished:
            installed = Path(unfinished) / "builder"
            pip("install", "--target", installed, BUILDER)
            installed.rename(builder)
    return builder


def build_package(source: Path, target: Path, builder: Path) -> list[Path]:
    """Build the sdist and the wheel of one package.

    Args:
        source: The folder with its ``pyproject.toml``.
        target: Folder for what is built; made if need be.
        builder: What :func:`find_builder` returned.

    Returns:
        The paths of what is in ``target`` of this package: the wheel and the sdist.
    """
    fixed = {"PYTHONPATH": str(builder), "PYTHONSAFEPATH": "1"}
    fixed["SOURCE_DATE_EPOCH"] = SOURCE_DATE_EPOCH
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(target.resolve())]
    result = subprocess.run(
        command, cwd=source, env=os.environ | fixed, check=False, capture_output=True, text=True
    )
    if result.returncode:
        sys.exit(f"{source.name}: hatchling failed:\n{result.stderr}")
    return sorted(target.glob(f"{source.name.replace('-', '_')}-*"))


def install(wheels: Path, names: list[str], constraints: list[str]) -> None:
    """Install wheels and what they depend on into the running environment.

    Args:
        wheels: Folder with the wheels.
        names: Distributions to install, each with optional extras in brackets.
            A sibling that one of them needs has to be named as well.
        constraints: Constraint files for everything else.
    """
    ours = [wheel_path(wheels, name) for name in names]
    remove_unnamed(names)
    pip("install", "--no-deps", "--force-reinstall", "--no-index", *ours)
    options = [part for file in constraints for part in ("--constraint", file)]
    pip("install", *options, *ours)
    pip("check")


def wheel_path(wheels: Path, requirement: str) -> str:
    """Return the path of the wheel for ``name[extra]``, with the extra."""
    name, bracket, extras = requirement.partition("[")
    found = sorted(wheels.glob(f"{name.replace('-', '_')}-*.whl"))
    if len(found) != 1:
        sys.exit(f"{name}: expected one wheel in {wheels}, found {len(found)}")
    return f"{found[0]}{bracket}{extras}"


def remove_unnamed(names: list[str]) -> None:
    """Uninstall packages of ours that an earlier run left behind."""
    wanted = {name.partition("[")[0] for name in names}
    installed = {dist.metadata["Name"] for dist in metadata.distributions()}
    left = {package.name for package in PACKAGES} & installed - wanted
    if left:
        pip("uninstall", "--yes", *sorted(left))


def pip(*arguments: str | Path) -> None:
    """Run pip of this environment; end the program if it fails."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--quiet"]
    result = subprocess.run(command, check=False, env=os.environ | {"PIP_NO_INPUT": "1"})
    if result.returncode:
        sys.exit(f"pip {arguments[0]} failed")


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["build", "install"])
    parser.add_argument("names", nargs="*", metavar="NAME[EXTRA]")
    parser.add_argument("--wheelhouse", type=Path, required=True)
    parser.add_argument("-c", "--constraint", action="append", default=[])
    options = parser.parse_intermixed_args()
    wheels = build(options.wheelhouse.resolve())
    if options.action == "install":
        install(wheels, options.names, options.constraint)
    print(f"wheels: {wheels.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
