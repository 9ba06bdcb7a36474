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
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from matrix_cell import CONSTRAINTS, NAMES, requirements
from torch_builds import read_pair

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
RECORDS = ROOT / "docs" / "compatibility"
TEMPLATE = Path(__file__).with_name("compatibility.md.jinja")
PYTHONS = ("3.11", "3.12", "3.13")
COLUMNS = ("passes", "core", "x86", "arm", "arm-emulated")
NOT_RUN = "not run"


@dataclass(frozen=True)
class Run:
    """What one record says.

    Attributes:
        name: The environment: ``py311-x86-torch29`` or ``arm-emulated-torch210``.
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
        """The column of the table."""
        front, _ = self.name.rsplit("-", 1)
        return front.partition("-")[2] if front.startswith("py") else front

    @property
    def python(self) -> str:
        """The minor version of Python."""
        return ".".join(self.content["python"].split(".")[:2])

    @property
    def cell(self) -> str:
        """What the table shows."""
        counts = self.content["counts"]
        wrong = counts["failed"] + counts["error"] + counts["xpassed"]
        passed = f"{counts['passed']:,} passed"
        text = passed if self.content["is_passed"] else f"**{wrong or 'no'} failed**, {passed}"
        return f"[{text}](compatibility/{self.name}.json)"


def read_runs() -> list[Run]:
    """Return the committed records, by name."""
    paths = sorted(RECORDS.glob("*.json"))
    return [Run(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def rows(runs: Sequence[Run], python: str) -> list[list[str]]:
    """Return the table of one Python: a line for each torch, a column for each package."""
    cells = {(run.version, run.column): run.cell for run in runs if run.python == python}
    found = []
    for key, constraints in versions().items():
        pair = read_pair(constraints)
        note = {"oldest": ", everything as old as promised", "latest": ", everything new"}
        cell_texts = [cells.get((key, column), NOT_RUN) for column in COLUMNS]
        if key.startswith("torch") or set(cell_texts) != {NOT_RUN}:
            found.append([pair.torch + note.get(key, ""), pair.torchao, *cell_texts])
    return found


def versions() -> dict[str, Path]:
    """Return the files of pairs by the end of an environment's name."""
    named = {
        "torch" + path.stem.removeprefix("torch-").replace(".", ""): path for path in CONSTRAINTS
    }
    return named | {"oldest": CONSTRAINTS[0], "latest": CONSTRAINTS[-1]}


def render(runs: Sequence[Run]) -> str:
    """Return the page."""
    machines = sorted({(run.content["cpu"], run.content["machine"]) for run in runs})
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False,  # noqa: S701 -- Markdown
        keep_trailing_newline=True,
    )  # fmt: skip
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        tables={python: rows(runs, python) for python in PYTHONS if any(run.python == python for run in runs)},
        silent=[python for python in PYTHONS if not any(run.python == python for run in runs)],
        columns=COLUMNS,
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
    from versatil_core.versions import SUPPORTED_VERSIONS, TORCHAO_FOR_TORCH

    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != render(runs):
        yield f"{PAGE.name} is not what the records say: run tools/compatibility.py --write"
    pairs = [read_pair(path) for path in CONSTRAINTS]
    tested = {minor(pair.torch): minor(pair.torchao) for pair in pairs}
    if tested != dict(TORCHAO_FOR_TORCH):
        yield f"tools/constraints has the pairs {tested}, versatil_core.versions {dict(TORCHAO_FOR_TORCH)}"
    for name, range_ in SUPPORTED_VERSIONS.items():
        proven = sorted(Version(getattr(pair, name)) for pair in pairs)
        if SpecifierSet(range_) != exact_range(proven):
            yield f"versatil_core.versions admits {name} {range_}, tools/constraints has {exact_range(proven)}"
        for package in NAMES:
            asked = requirements(package).get(name)
            if asked and asked.specifier != SpecifierSet(range_):
                yield f"{package} requires {asked}, versatil_core.versions admits {range_}"
    for run in runs:
        yield from disagreements_of(run)


def disagreements_of(run: Run) -> Iterator[str]:
    """Yield where a record is not of the versions that its name says."""
    if run.version not in versions():
        yield f"{run.name}.json: there is no file of pairs for {run.version}"
        return
    pair = read_pair(versions()[run.version])
    wanted = {"torch": pair.torch, "torchao": pair.torchao}
    for name, version in run.content["versions"].items():
        if name in wanted and Version(version).public != wanted[name]:
            yield f"{run.name}.json was run with {name} {version}, tools/constraints has {wanted[name]}"
    if (
        run.name.startswith("py")
        and f"py{run.python.replace('.', '')}" != run.name.partition("-")[0]
    ):
        yield f"{run.name}.json was run with Python {run.content['python']}"


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
        shutil.copyfile(path, RECORDS / path.name)
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
    PAGE.write_text(render(read_runs()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
