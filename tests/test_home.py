"""What the top-level files promise is what the other top-level files do."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


TEST_COMMAND = "python3 -m pip install tox && python3 -m tox run -m ci"
DEMO_COMMAND = "python3 -m pip install tox && python3 -m tox run -e demo"

# Apart from the words, or this file would be reported itself.
SLASH = "/"


def test_ci_runs_the_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()

    assert TEST_COMMAND in script
    assert TEST_COMMAND in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_readme_shows_the_demo_command() -> None:
    assert DEMO_COMMAND in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_torch_and_torchao_are_paired_within_the_declared_ranges() -> None:
    from packaging.specifiers import SpecifierSet

    project = tomllib.loads((ROOT / "packages/versatil-core/pyproject.toml").read_text("utf-8"))
    ranges = {
        re.split(r"[<>=]", line)[0]: SpecifierSet(line.lstrip("torcha"))
        for line in project["project"]["dependencies"]
        if line.startswith("torch")
    }
    for file in sorted((ROOT / "tools" / "constraints").glob("torch-*.txt")):
        pins = dict(
            line.split("==") for line in file.read_text("utf-8").splitlines() if "==" in line
        )
        assert ranges["torch"].contains(pins["torch"]), file.name
        assert ranges["torchao"].contains(pins["torchao"]), file.name


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ("see /proc/cpuinfo and #!/usr/bin/env", True),
        ("https://example.org/work/shared", True),
        (f"open('{SLASH}root/model.pt')", False),
        (f"cd {SLASH}home/someone", False),
    ],
)
def test_machine_paths_are_noticed(tmp_path: Path, text: str, is_fine: bool) -> None:
    code = f"import check_text; raise SystemExit(bool(check_text.problems('a.md', {text!r})))"

    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "tools")},
        check=False,
    )

    assert (result.returncode == 0) == is_fine
