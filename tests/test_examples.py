"""Every Python block in the README and the documentation runs, each on its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunPython

ROOT = Path(__file__).resolve().parent.parent


BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
FILES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]


def examples() -> list[tuple[str, str, str]]:
    """Return ``(place, code, expected output)`` of every example."""
    found = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            place = f"{file.relative_to(ROOT)}:{line}"
            found.append((place, match.group(1), match.group(2) or ""))
    return found


EXAMPLES = examples()


@pytest.mark.parametrize(
    ("code", "output"),
    [example[1:] for example in EXAMPLES],
    ids=[example[0] for example in EXAMPLES],
)
def test_example_runs(run_python: RunPython, code: str, output: str) -> None:
    """A ``text`` block right below an example is what the example prints."""
    result = run_python(code)

    if output:
        assert result.stdout.strip() == output.strip()


def test_no_block_escapes() -> None:
    """A block that the pattern above doesn't find would never be run."""
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert len(BLOCK.findall(text)) == len(re.findall(r"^\s*```py", text, re.MULTILINE))


def test_links_lead_to_files() -> None:
    """A relative link in a Markdown file names a file that exists."""
    pages = [*FILES, *ROOT.glob("*.md"), *ROOT.glob("packages/*/CHANGELOG.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (Path(page).parent / target).exists(), f"{page.name}: {target}"
