"""What a tool writes is there whole, or is as it was."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

import public_api
import workflows
from whole_files import write_whole

ROOT = Path(__file__).resolve().parent.parent


def test_a_failure_leaves_the_old_text_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_whole(file, "old\n")

    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "new" * 10_000 + "\ud800")  # no encoding has this

    assert file.read_text(encoding="utf-8") == "old\n"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("tool", "needs", "target"),
    [
        (public_api, "packages/versatil-passes/pyproject.toml", "public_api.txt"),
        (workflows, "tox.ini", ".github/workflows/release.yml"),
    ],
)
def test_what_is_written_replaces_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: ModuleType, needs: str, target: str
) -> None:
    """Whoever reads the old file meanwhile keeps it, as a second name for it shows."""
    (tmp_path / needs).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / needs, tmp_path / needs)
    file = (tmp_path / needs).parent / target
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("old\n", encoding="utf-8")
    os.link(file, tmp_path / "second_name")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["a tool", "--write"])

    tool.main()

    assert len(file.read_text(encoding="utf-8")) > len("old\n")
    assert (tmp_path / "second_name").read_text(encoding="utf-8") == "old\n"
