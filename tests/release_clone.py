"""A copy of this repository to release from, and what is done with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from release_state import MARKER, OURS, about_version, git

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(OURS)


def copy_as_released(home: Path) -> None:
    """Write this repository as it is after a release of every package."""
    for name in git(ROOT, "ls-files", "-z", "-c", "-o", "--exclude-standard").split("\0"):
        if name and (ROOT / name).is_file():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, home / name)
    git(home, "init", "--quiet", "--initial-branch", "main")
    for setting in ["user.name=Tester", "user.email=tester@example.org", "commit.gpgsign=false"]:
        git(home, "config", *setting.split("="))
    for package in PACKAGES:
        empty_changelog(home / "packages" / package)
        section = f"\n## {about_version(home / 'packages' / package)} (2026-01-01)\n"
        with (home / "packages" / package / "CHANGELOG.md").open("a", encoding="utf-8") as file:
            file.write(section)
    commit(home, "as released")
    for package in PACKAGES:
        tag = f"{package}-v{about_version(home / 'packages' / package)}"
        git(home, "tag", "--annotate", "--message", tag, tag)


def empty_changelog(project: Path) -> None:
    """Leave neither a fragment nor a section."""
    for fragment in (project / "changelog.d").glob("*.*.md"):
        fragment.unlink()
    text = (project / "CHANGELOG.md").read_text(encoding="utf-8")
    head = text.partition(MARKER)[0]
    (project / "CHANGELOG.md").write_text(f"{head}{MARKER}\n", encoding="utf-8")


def commit(home: Path, message: str) -> None:
    """Commit everything."""
    git(home, "add", "--all")
    git(home, "commit", "--quiet", "--message", message)


def add_fragment(home: Path, package: str) -> None:
    """Commit a change of a package, as its changelog knows it."""
    folder = home / "packages" / package / "changelog.d"
    (folder / "rounding.numerics.md").write_text("Rounds to even.\n", encoding="utf-8")
    commit(home, "a change")


def release(home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the clone's own tool."""
    command = [sys.executable, home / "tools" / "release.py", *arguments]
    return subprocess.run(
        list(map(str, command)), cwd=home, check=False, capture_output=True, text=True
    )


def snapshot(home: Path) -> list[str]:
    """Return all that a release changes: branch, tags, files, worktrees, what is built."""
    return [
        git(home, "show-ref", "--head"),
        git(home, "status", "--porcelain", "--ignored", "--", ":!*__pycache__*"),
        git(home, "worktree", "list"),
        *sorted(map(str, (home / "dist").rglob("*"))),
    ]


def after(home: Path, package: str, level: str) -> str:
    """Return the version that follows the package's own."""
    major, minor, patch = about_version(home / "packages" / package).release
    return f"{major}.{minor + 1}.0" if level == "minor" else f"{major}.{minor}.{patch + 1}"
