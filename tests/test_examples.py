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
        blocks = [
            (text.count("\n", 0, match.start()) + 1, match.group(1), match.group(2) or "")
            for match in BLOCK.finditer(text)
        ]
        if file.parent.name == "tutorial":
            blocks = joined(blocks)
        place = file.relative_to(ROOT)
        found += [(f"{place}:{line}", code, output) for line, code, output in blocks]
    return found


def joined(blocks: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Make one example of all blocks: a tutorial goes on where it left off."""
    first_lines, codes, outputs = zip(*blocks, strict=True)
    return [(first_lines[0], "\n".join(codes), "\n".join(filter(None, outputs)))]


def lines_of(text: str) -> list[str]:
    """Return the lines that say something, without the spaces that a table ends in."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


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
        assert lines_of(result.stdout) == lines_of(output)


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
