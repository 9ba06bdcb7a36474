"""Make docs/compatibility.md of runs that happened, and check every promise about versions.

Usage::

    python tools/compatibility.py --collect DIR   # take over the records of new runs; write
    python tools/compatibility.py --write         # only write the page anew
    python tools/compatibility.py --check         # exit 1 with each disagreement

A record is what tools/run_record.py wrote about one environment of tox.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from matrix_cell import CONSTRAINTS, NAMES, VERSIONS, requirements
from torch_builds import read_pair
from whole_files import write_whole

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
RECORDS = ROOT / "docs" / "compatibility"
TEMPLATE = Path(__file__).with_name("compatibility.md.jinja")
# Those that tox knows; the packages name those with a run that passed.
PYTHONS = ("3.11", "3.12", "3.13")
# Of these, each torch needs a run that passed.
PROMISED = ("passes", "core", "x86")
COLUMNS = (*PROMISED, "arm", "arm-emulated", "arm-native")
NOT_RUN = "not run"
# What a record has, see tools/run_record.py.
FIELDS = (
    "package",
    "is_passed",
    "counts",
    "skipped",
    "compiled_libraries",
    "python",
    "versions",
    "machine",
    "cpu",
    "is_emulated",
    "date",
)


@dataclass(frozen=True)
class Run:
    """What one record says.

    Attributes:
        name: The environment: ``py311-x86-torch29``, ``arm-emulated-torch210``.
        content: The record, see tools/run_record.py.
    """

    name: str
    content: dict[str, Any]

    @property
    def version(self) -> str:
        """Which torch: ``torch29``, ``oldest`` or ``latest``."""
        return self.name.rpartition("-")[2]

    @property
    def column(self) -> str:
        """The column of the table: the name without Python and torch."""
        return "-".join(part for part in self.name.split("-")[:-1] if not part.startswith("py"))

    @property
    def package(self) -> str:
        """The package that was tested."""
        return f"versatil-{self.column.partition('-')[0]}"

    @property
    def python(self) -> str:
        """The minor version of Python."""
        return minor(self.content["python"])

    @property
    def cell(self) -> str:
        """What the table shows."""
        counts = self.content["counts"]
        wrong = counts["failed"] + counts["error"] + counts["xpassed"]
        text = f"{counts['passed']:,} passed"
        if not self.content["is_passed"]:
            text = f"**failed**: {wrong} of {wrong + counts['passed']:,}"
        return f"[{text}](compatibility/{self.name}.json)"


def read_runs() -> list[Run]:
    """Return the committed records, by name."""
    return [Run(path.stem, read_record(path)) for path in sorted(RECORDS.glob("*.json"))]


def read_record(path: Path) -> dict[str, Any]:
    """Read a record; one that is damaged is empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def rows(runs: Sequence[Run], python: str) -> list[list[str]]:
    """Return the table of one Python: a line for each torch, a column for each package."""
    cells = {(run.version, run.column): run.cell for run in runs if run.python == python}
    found = []
    for key, constraints in VERSIONS.items():
        pair = read_pair(constraints)
        note = {"oldest": ", everything as old as promised", "latest": ", everything new"}
        cell_texts = [cells.get((key, column), NOT_RUN) for column in COLUMNS]
        if key.startswith("torch") or set(cell_texts) != {NOT_RUN}:
            found.append([pair.torch + note.get(key, ""), pair.torchao, *cell_texts])
    return found


def render(runs: Sequence[Run]) -> str:
    """Return the page."""
    machines = sorted(
        {
            (run.content["cpu"], run.content["machine"] + ", emulated" * run.content["is_emulated"])
            for run in runs
        }
    )
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False,  # noqa: S701 -- Markdown
        keep_trailing_newline=True,
    )  # fmt: skip
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        tables={python: rows(runs, python) for python in PYTHONS if any(run.python == python for run in runs)},
        silent=[python for python in PYTHONS if not any(run.python == python for run in runs)],
        machines=machines,
        dates=sorted({run.content["date"] for run in runs}),
        skipped=skipped(runs),
    )  # fmt: skip


def skipped(runs: Sequence[Run]) -> list[tuple[str, str, int]]:
    """Return each reason for which tests were skipped: the runs, the reason, at most how many."""
    found: dict[tuple[str, str], int] = {}
    for run in runs:
        for reason, count in run.content["skipped"].items():
            key = (run.column, reason)
            found[key] = max(count, found.get(key, 0))
    return [(column, reason, count) for (column, reason), count in sorted(found.items())]


def disagreements(runs: Sequence[Run]) -> Iterator[str]:
    """Yield each way in which page, records, pairs, requirements and code say different things."""
    broken = [what for run in runs for what in disagreements_of(run)]
    yield from broken
    if not broken:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != render(runs):
            yield f"{PAGE.name} is not what the records say: run tools/compatibility.py --write"
        yield from unproved(runs)
    yield from other_ranges()


def unproved(runs: Sequence[Run]) -> Iterator[str]:
    """Yield each promise without a run that passed."""
    passed = [run for run in runs if run.content["is_passed"]]
    cells = {(run.version, run.column) for run in passed}
    for version, constraints in VERSIONS.items():
        for column in PROMISED if version.startswith("torch") else ():
            if (version, column) not in cells:
                torch = read_pair(constraints).torch
                yield f"torch {torch} is promised, and no run of {column} with it has passed"
    for python in sorted(named_pythons() - {run.python for run in passed}):
        yield f"Python {python} is promised, and no run with it has passed"


def named_pythons() -> set[str]:
    """Return the versions of Python that a package of ours names in its classifiers."""
    texts = [(ROOT / "packages" / name / "pyproject.toml").read_text("utf-8") for name in NAMES]
    return set(re.findall(r"Programming Language :: Python :: (3\.\d+)", "".join(texts)))


def other_ranges() -> Iterator[str]:
    """Yield where packages and code admit other versions than those of the pairs."""
    from versatil_core.versions import SUPPORTED_VERSIONS, TORCHAO_FOR_TORCH

    pairs = [read_pair(path) for path in CONSTRAINTS]
    tested = {minor(pair.torch): minor(pair.torchao) for pair in pairs}
    checked = dict(TORCHAO_FOR_TORCH)
    if tested != checked:
        yield f"tools/constraints has the pairs {tested}, versatil_core.versions {checked}"
    for name, admitted in SUPPORTED_VERSIONS.items():
        proven = exact_range(sorted(Version(getattr(pair, name)) for pair in pairs))
        if SpecifierSet(admitted) != proven:
            yield f"versatil_core.versions admits {name} {admitted}, tools/constraints has {proven}"
        for package in NAMES:
            asked = requirements(package).get(name)
            if asked is None and (name, package) != ("torchao", "versatil-passes"):
                yield f"{package} does not require {name}"
            elif asked is not None and asked.specifier != SpecifierSet(admitted):
                yield f"{package} requires {asked}, versatil_core.versions admits {admitted}"


def disagreements_of(run: Run) -> Iterator[str]:
    """Yield where a record is not one of the environment that its name says."""
    if run.column not in COLUMNS or run.version not in VERSIONS or set(FIELDS) - {*run.content}:
        yield f"{run.name}.json is no record of an environment of the matrix: delete it"
        return
    pair = read_pair(VERSIONS[run.version])
    found = {name: Version(version).public for name, version in run.content["versions"].items()}
    wanted = {"torch": pair.torch, "torchao": pair.torchao}
    if run.column == "passes":
        del wanted["torchao"]
    for name, version in wanted.items():
        if found.get(name) != version:
            yield f"{run.name}.json was run with {name} {found.get(name)}, tools/constraints has {version}"
    python = f"py{run.python.replace('.', '')}"
    if run.name.startswith("py") and not run.name.startswith(f"{python}-"):
        yield f"{run.name}.json was run with Python {run.content['python']}"
    if run.content["package"] != run.package:
        yield f"{run.name}.json is of {run.content['package']}"
    if run.content["is_emulated"] != (run.column == "arm-emulated"):
        yield f"{run.name}.json says of itself is_emulated={run.content['is_emulated']}"
    if not run.content["compiled_libraries"]:
        yield f"{run.name}.json is of a run that compiled nothing"


def exact_range(proven: Sequence[Version]) -> SpecifierSet:
    """Return the range from the oldest proven minor version to the newest."""
    oldest, newest = proven[0], proven[-1]
    return SpecifierSet(f">={oldest.major}.{oldest.minor},<{newest.major}.{newest.minor + 1}")


def minor(version: str) -> str:
    """Return ``"2.13"`` of ``"2.13.0"``."""
    return ".".join(map(str, Version(version).release[:2]))


def collect(folder: Path) -> None:
    """Take over the records of new runs."""
    RECORDS.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.json")):
        write_whole(RECORDS / path.name, path.read_text(encoding="utf-8"))
        print(f"collected {path.name}")


def main() -> int:
    """Parse the command line and do what it says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--collect", type=Path, metavar="DIR", help="copy new records, and write")
    action.add_argument("--write", action="store_true", help="write the page")
    action.add_argument("--check", action="store_true", help="say what disagrees")
    options = parser.parse_args()
    if options.check:
        found = list(disagreements(read_runs()))
        print(*found, sep="\n", file=sys.stderr)
        return 1 if found else 0
    if options.collect:
        collect(options.collect)
    write_whole(PAGE, render(read_runs()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
