"""Release one package: bump its version, build its changelog, try it, commit and tag.

Usage::

    python tools/release.py PACKAGE LEVEL --index DIR [--dry-run]
    python tools/release.py --check [PACKAGE] [--index DIR]

LEVEL is ``major``, ``minor`` or ``patch``. DIR holds the wheels that are published:
the new wheel is tried in clean environments with the newest and the oldest siblings that
its ranges admit, and with those that depend on it. Where the ranges of dependants in this
tree leave the new version out, the same commit raises them. Everything happens in a
worktree of its own, and the branch moves at the end; whatever fails before leaves files,
branch and tags as they were. Nothing is pushed or uploaded.

A package without a tag is released as what its ``__about__.py`` says, and the level is
what that is, counted from 0.0.0: 0.1.0 is ``minor``.

``--check`` changes nothing. It names each version, tag, changelog, fragment and range
that disagrees with another, one a line, and ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import release_plan
from clean_environment import make_environment, run
from release_plan import LEVELS, Release
from release_state import State, about_file, git, read_state
from wheels import PACKAGES, ROOT, build_package, find_builder


def check(packages: Sequence[str], index: Path | None) -> int:
    """Print what disagrees; return the exit code."""
    states = [read_state(ROOT, package, index) for package in packages]
    found = [
        f"{state.package}: {what}" for state in states for what in release_plan.disagreements(state)
    ]
    print("\n".join(found) or f"versions, tags, changelogs and ranges agree: {', '.join(packages)}")
    if untagged := [state.package for state in states if not state.released]:
        print(f"no tag here, unreleased or not fetched (git fetch --tags): {', '.join(untagged)}")
    return int(bool(found))


def prepare(package: str, level: str, index: Path) -> tuple[State, Release]:
    """Decide on a release; end the program if something stands in its way."""
    state = read_state(ROOT, package, index)
    release = release_plan.plan(state, level)
    found = release_plan.problems(state, release)
    if found:
        lines = "".join(f"\n- {what}" for what in found)
        sys.exit(f"{package} {release.new} can't be released:{lines}")
    return state, release


def description(state: State, release: Release) -> str:
    """Return what a release is going to do, for people."""
    tried = (with_what(names) for names in release_plan.trials(state, release))
    rows = {
        "version": f"{release.old} -> {release.new}"
        if state.newest
        else f"{release.new}, the first",
        "fragments": f"{len(state.fragments)}; --dry-run prints the changelog",
        "tried": "; ".join(tried),
        "commit": f"{release.subject}, on {state.branch}",
        "tag": release.tag,
    }
    if names := release_plan.left_behind(state, release):
        rows["raised"] = f"to {release.package}{release.interface} in {', '.join(names)}"
    lines = [release.package, *(f"  {name:<11}{text}" for name, text in rows.items())]
    return "\n".join([*lines, *(f"  note: {note}" for note in release_plan.notes(state, release))])


def with_what(names: Sequence[str]) -> str:
    """Return what a wheel is tried with, for people."""
    return f"with {' '.join(names)}" if names else "alone"


def make(state: State, release: Release, index: Path, wheelhouse: Path) -> None:
    """Make a release. All of it, or nothing.

    Args:
        state: What it is made from.
        release: The release.
        index: Folder of published wheels.
        wheelhouse: Folder that holds the builder, see tools/wheels.py.
    """
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    with worktree() as tree, tempfile.TemporaryDirectory(dir=dist) as folder:
        set_version(tree, release)
        build_changelog(tree, release)
        for name in release_plan.left_behind(state, release):
            raise_range(tree / "packages" / name, release)
        project = tree / "packages" / release.package
        built = build_package(project, Path(folder), find_builder(wheelhouse))
        [wheel] = [path for path in built if path.suffix == ".whl"]
        try_out(wheel, project, state, release, index)
        git(tree, "add", "--all")
        git(tree, "commit", "--quiet", "--message", release.subject)
        commit = git(tree, "rev-parse", "HEAD").strip()
        with moved(built, dist):
            publish_here(release, commit)
    print(f"released {release.package} {release.new}: {commit[:9]}, {release.tag}")
    print("next, since nothing was pushed or uploaded:")
    print("  python -m tox run -m ci")
    print(f"  git push --atomic origin {state.branch} {release.tag}")
    print("the tag's workflow builds the same files, tests and publishes them; without it, upload")
    print(f"  {' '.join(f'dist/{path.name}' for path in built)}")


@contextmanager
def worktree() -> Iterator[Path]:
    """Yield a checkout of HEAD beside the repository, without a branch."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git(ROOT, "worktree", "add", "--quiet", "--detach", tree, "HEAD")
        try:
            yield tree
        finally:
            git(ROOT, "worktree", "remove", "--force", tree)


def set_version(tree: Path, release: Release) -> None:
    """Write the new version into ``__about__.py``."""
    file = about_file(tree / "packages" / release.package)
    lines = file.read_text(encoding="utf-8").splitlines()
    new = f'__version__ = "{release.new}"'
    file.write_text(
        "\n".join(new if line.startswith("__version__ =") else line for line in lines) + "\n",
        encoding="utf-8",
    )


def raise_range(project: Path, release: Release) -> None:
    """Let a dependant ask for the released interface, and say so in its next changelog."""
    file = project / "pyproject.toml"
    text = release_plan.raised(file.read_text(encoding="utf-8"), release)
    file.write_text(text, encoding="utf-8")
    fragment = project / "changelog.d" / f"needs-{release.package}.changed.md"
    needed = f"{release.new.major}.{release.new.minor}"
    fragment.write_text(f"Needs {release.package} {needed}.\n", encoding="utf-8")


def build_changelog(tree: Path, release: Release, *options: str) -> str:
    """Let towncrier move the fragments into the changelog; return what it prints."""
    command = [sys.executable, "-m", "towncrier", "build", "--version", str(release.new)]
    place = ["--config", tree / "towncrier.toml", "--dir", tree / "packages" / release.package]
    result = subprocess.run(
        [*command, *map(str, place), *(options or ["--yes"])],
        cwd=tree,
        check=False,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        sys.exit(f"towncrier failed:\n{result.stderr.strip()}")
    return result.stdout


def try_out(wheel: Path, project: Path, state: State, release: Release, index: Path) -> None:
    """Run the new wheel with its published siblings, then with each published dependant."""
    smoke = Path(__file__).with_name("release_smoke.py")
    for with_it in release_plan.trials(state, release):
        print(f"trying it {with_what(with_it)}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            python = make_environment(Path(folder) / "venv", [wheel], index, with_it)
            manifest = project / "public_api.txt"
            print(run(python, smoke, release.package, manifest, folder=Path(folder)), end="")


def publish_here(release: Release, commit: str) -> None:
    """Tag the commit and move the branch to it: both, or neither."""
    message = f"{release.package} {release.new}"
    git(ROOT, "tag", "--annotate", "--message", message, release.tag, commit)
    try:
        git(ROOT, "merge", "--quiet", "--ff-only", commit)
    except BaseException:
        git(ROOT, "tag", "--delete", release.tag)
        raise


@contextmanager
def moved(files: Sequence[Path], folder: Path) -> Iterator[None]:
    """Move files into a folder; take them away again if what follows fails."""
    with ExitStack() as undo:
        for path in files:
            undo.callback(path.replace(folder / path.name).unlink)
        yield
        undo.pop_all()


def main() -> int:
    """Parse the command line and do what it says; return the exit code."""
    names = [package.name for package in PACKAGES]
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", nargs="?", choices=names)
    parser.add_argument("level", nargs="?", choices=LEVELS)
    parser.add_argument("--index", type=Path, metavar="DIR", help="the wheels that are published")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.add_argument("--check", action="store_true", help="print what disagrees")
    parser.add_argument(
        "--wheelhouse",
        type=Path,
        metavar="DIR",
        default=ROOT / ".tox" / "wheelhouse",
        help="where tools/wheels.py keeps what builds; that of tox, if not said",
    )
    options = parser.parse_args()
    if options.check:
        return check([options.package] if options.package else names, options.index)
    if not (options.package and options.level and options.index):
        parser.error("a release takes PACKAGE, LEVEL and --index DIR")
    state, release = prepare(options.package, options.level, options.index)
    print(description(state, release))
    if options.dry_run:
        print(build_changelog(ROOT, release, "--draft").strip())
        return 0
    try:
        make(state, release, options.index.resolve(), options.wheelhouse.resolve())
    except OSError as error:
        sys.exit(f"{release.package} {release.new} was not released: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
