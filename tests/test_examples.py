"""What the README and the documentation show is run: Python blocks and `versatil` commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.main

from versatil_core.command import app

if TYPE_CHECKING:
    from conftest import RunPython

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
# A `text` block right below a Python block is what it prints; a block with a title is a file.
PYTHON = re.compile(
    r'^```python(?: title="(?P<title>[\w.]+)")?\n(?P<code>.*?)^```$'
    r"(?:\n+```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Example:
    """What runs in one folder: files are written, then the code runs, then the commands."""

    place: str
    code: str = ""
    output: str = ""
    files: dict[str, str] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)


def examples_of(page: Path) -> list[Example]:
    """Return the examples of one page; those of a tutorial are one, since it goes on."""
    text = page.read_text(encoding="utf-8")
    place = str(page.relative_to(ROOT))
    files, blocks = {}, []
    for match in PYTHON.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["title"]:
            files[match["title"]] = match["code"]
        else:
            blocks.append(Example(f"{place}:{line}", match["code"], match["output"] or ""))
    if page.parent.name == "tutorial":
        blocks = [joined(blocks)]
    commands = [line for lines in shell_blocks(text) for line in runnable(lines)]
    if files or commands:
        if page.parent.name != "tutorial":
            blocks.append(Example(f"{place}:commands"))
        blocks[-1].files = files
        blocks[-1].commands = commands
    return blocks


def joined(blocks: list[Example]) -> Example:
    """Make one example of all."""
    codes = [block.code for block in blocks]
    outputs = [block.output for block in blocks if block.output]
    return Example(blocks[0].place, "\n".join(codes), "\n".join(outputs))


def shell_blocks(text: str) -> list[list[list[str]]]:
    """Return the shell blocks of a page: the words of each line, without comments."""
    blocks = [block.replace("\\\n", " ").splitlines() for block in SHELL.findall(text)]
    return [[shlex.split(line, comments=True) for line in lines] for lines in blocks]


def runnable(block: list[list[str]]) -> list[list[str]]:
    """Return the lines of a shell block that has nothing but commands of ours.

    Anything else (an environment to make, another machine, a folder to go to) is for readers.
    """
    return block if all(words[:1] == ["versatil"] for words in block) else []


def lines_of(text: str) -> list[str]:
    """Return the lines that say something, without the spaces that a table ends in."""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


EXAMPLES = [example for file in FILES for example in examples_of(file)]


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.place for example in EXAMPLES])
def test_example_runs(run_python: RunPython, tmp_path: Path, example: Example) -> None:
    for name, content in example.files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")

    result = run_python(example.code)
    if example.output:
        assert lines_of(result.stdout) == lines_of(example.output)

    for name, *arguments in example.commands:
        program = [str(Path(sys.executable).with_name(name)), *arguments]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{program}\n{done.stdout}{done.stderr}"


def test_every_file_of_an_example_is_used() -> None:
    for example in EXAMPLES:
        for name in example.files:
            used = example.code + str(example.commands)
            # As a script, or as a module with something in it.
            is_used = re.search(rf"\b{Path(name).stem}(\.py\b|:)", used)
            assert is_used, f"{example.place}: nothing runs {name}"


def commands_shown() -> Iterator[tuple[str, list[str]]]:
    """Yield every use of `versatil` in a shell block or in code marks, with its page."""
    for page in FILES:
        text = page.read_text(encoding="utf-8")
        lines = [words for block in shell_blocks(text) for words in block]
        prose = PYTHON.sub("", SHELL.sub("", text))
        lines += [shlex.split(code) for code in re.findall(r"`(versatil\s[^`]+)`", prose)]
        for words in lines:
            if "versatil" in words:
                yield page.name, words[words.index("versatil") + 1 :]


def test_commands_and_options_exist() -> None:
    command = typer.main.get_command(app)
    commands = command.commands  # type: ignore[attr-defined]
    everywhere = {option for parameter in command.params for option in parameter.opts}
    shown = list(commands_shown())

    assert shown
    for page, words in shown:
        if words[0].startswith("-"):
            assert words[0] in {*everywhere, "--help"}, f"{page}: versatil {words[0]}"
            continue
        assert words[0] in commands, f"{page}: versatil {words[0]}"
        known = {opt for parameter in commands[words[0]].params for opt in parameter.opts}
        for option in words[1:]:
            if option.startswith("-"):
                assert option.split("=")[0] in {*known, "--help"}, f"{page}: {words}"


def test_no_block_escapes() -> None:
    """A block that the pattern above doesn't find would never be run."""
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert len(PYTHON.findall(text)) == len(re.findall(r"^\s*```py", text, re.MULTILINE))
        assert len(SHELL.findall(text)) == len(
            re.findall(r"^\s*```(?:sh|bash)", text, re.MULTILINE)
        )


def test_links_lead_to_files() -> None:
    """A relative link in a Markdown file names a file that exists."""
    pages = [*FILES, *ROOT.glob("*.md"), *ROOT.glob("packages/*/CHANGELOG.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (Path(page).parent / target).exists(), f"{page.name}: {target}"
