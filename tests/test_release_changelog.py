"""The fragments of every package make a changelog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from release_state import OURS, changelog_versions, fragment_kinds, fragment_names

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(OURS)


def draft(project: Path) -> str:
    """Return what towncrier would write for a package."""
    place = ["--config", str(ROOT / "towncrier.toml"), "--dir", str(project)]
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "7.8.9"]
    result = subprocess.run([*command, *place], capture_output=True, text=True, check=True)
    return result.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_every_fragment_is_in_the_changelog(package: str) -> None:
    folder = ROOT / "packages" / package / "changelog.d"

    written = draft(folder.parent)

    lines = {line.strip().removeprefix("- ") for line in written.splitlines()}
    for name in fragment_names(folder):
        short_name, kind, ending = name.split(".")
        text = (folder / name).read_text(encoding="utf-8")
        assert short_name
        assert ending == "md"
        assert kind in fragment_kinds(ROOT)
        assert f"### {kind.capitalize()}" in written
        assert text.strip()
        assert {line.strip() for line in text.splitlines()} <= lines, name


@pytest.mark.parametrize("package", PACKAGES)
def test_the_changelog_can_be_added_to(package: str) -> None:
    """The marker is there, and versions go down."""
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text(encoding="utf-8")

    versions = changelog_versions(text)

    assert list(versions) == sorted(set(versions), reverse=True)


def test_what_changes_results_has_a_heading_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "changelog.d"
    folder.mkdir()
    (folder / "b.numerics.md").write_text("Rounds to even.\n", encoding="utf-8")
    (folder / "a.added.md").write_text("Two lines,\nkept apart.\n", encoding="utf-8")
    (tmp_path / "CHANGELOG.md").touch()

    written = draft(tmp_path)

    assert written.startswith("## 7.8.9 (")
    assert written.split("\n", 1)[1].strip() == (
        "### Added\n\n- Two lines,\n  kept apart.\n\n### Numerics\n\n- Rounds to even."
    )
    assert "numerics" in fragment_kinds(ROOT)
