"""The page of versions is made of records, and every promise about versions is the same one."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from packaging.requirements import Requirement

import compatibility
from compatibility import Run, disagreements, read_runs, render
from matrix_cell import VERSIONS
from torch_builds import read_pair
from versatil_core import versions

COUNTS = {"passed": 1118, "failed": 0, "error": 0, "skipped": 2, "xfailed": 0, "xpassed": 0}
RECORD: dict[str, Any] = {
    "package": "versatil-x86",
    "is_passed": True,
    "counts": COUNTS,
    "skipped": {"torch has no such kernel": 2},
    "compiled_libraries": 40,
    "python": "3.11.7",
    "versions": {"torch": "2.9.1+cu128", "torchao": "0.15.0"},
    "machine": "x86_64",
    "cpu": "A processor",
    "is_emulated": False,
    "date": "2026-11-30",
}


def run(name: str, **changes: Any) -> Run:
    return Run(name, copy.deepcopy(RECORD) | changes)


def proof(python: str = "3.11.7") -> list[Run]:
    """A run that passed for each promise, all with one Python."""
    pairs = {end: read_pair(path) for end, path in VERSIONS.items()}
    front = f"py{python.replace('.', '')[:3]}"
    return [
        run(
            f"{front}-{column}-{end}",
            package=f"versatil-{column}",
            python=python,
            versions={"torch": pair.torch, "torchao": pair.torchao},
        )
        for end, pair in pairs.items()
        for column in compatibility.PROMISED
    ]


def line(page: str, torch: str) -> list[str]:
    """The cells of a line of the first table."""
    [found] = [text for text in page.splitlines() if text.startswith(f"| {torch} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_nothing_disagrees() -> None:
    """The page, the records, the pairs, what the packages require, what they check."""
    assert list(disagreements(read_runs())) == []


def test_each_promise_takes_a_run_that_passed() -> None:
    runs = [*proof(), *proof("3.12.1"), *proof("3.13.0")]
    assert list(compatibility.unproved(runs)) == []

    fewer = [each for each in runs if each.name != "py311-x86-torch212"]
    other = [
        each for each in fewer if each.name not in {"py312-x86-torch212", "py313-x86-torch212"}
    ]
    failed = [*other, run("py311-x86-torch212", is_passed=False)]

    assert list(compatibility.unproved(fewer)) == []  # with another Python
    promise = "torch 2.12.1 is promised, and no run of x86 with it has passed"
    assert list(compatibility.unproved(other)) == list(compatibility.unproved(failed)) == [promise]


def test_each_python_takes_a_run_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "named_pythons", lambda: {"3.11", "3.12"})

    assert list(compatibility.unproved([*proof(), *proof("3.12.1")])) == []
    promise = "Python 3.12 is promised, and no run with it has passed"
    assert list(compatibility.unproved(proof())) == [promise]


def test_the_packages_name_a_python() -> None:
    assert "3.11" in compatibility.named_pythons() <= set(compatibility.PYTHONS)


def test_every_torch_has_a_line_and_what_nobody_ran_says_so() -> None:
    page = render([run("py311-x86-torch29"), run("arm-emulated-torch29")])

    ran = "[1,118 passed](compatibility/py311-x86-torch29.json)"
    emulated = "[1,118 passed](compatibility/arm-emulated-torch29.json)"
    assert line(page, "2.9.1") == [
        *("2.9.1", "0.15.0", "not run", "not run", ran, "not run", emulated, "not run")
    ]
    for torch in ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"):
        assert line(page, torch)[2:] == ["not run"] * 6
    assert "## Python 3.13\n\nNot run." in page
    assert "| x86 | 2 | torch has no such kernel |" in page


def test_a_failed_run_is_shown_as_one() -> None:
    page = render([run("py311-x86-torch29", is_passed=False, counts=COUNTS | {"failed": 3})])

    assert line(page, "2.9.1")[4].startswith("[**failed**: 3 of 1,121]")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("py311-x86-torch213", {}, "was run with torch 2.9.1, tools/constraints has 2.13.0"),
        ("py311-x86-torch210", {}, "was run with torchao 0.15.0, tools/constraints has 0.16.0"),
        ("py311-x86-torch29", {"versions": {}}, "was run with torch None"),
        ("py312-x86-torch29", {}, "was run with Python 3.11.7"),
        ("py311-core-torch29", {}, "is of versatil-x86"),
        ("py311-x86-torch29", {"is_emulated": True}, "is_emulated=True"),
        ("arm-emulated-torch29", {"package": "versatil-arm"}, "is_emulated=False"),
        ("py311-x86-torch29", {"compiled_libraries": 0}, "compiled nothing"),
        ("py311-x86-torch28", {}, "is no record"),
        ("py311-gpu-torch29", {}, "is no record"),
        ("arm", {}, "is no record"),
    ],
)
def test_a_record_of_something_else_is_noticed(
    name: str, changes: dict[str, Any], message: str
) -> None:
    found = list(disagreements([run(name, **changes)]))

    assert any(line.startswith(f"{name}.json") and message in line for line in found)


def test_a_damaged_record_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "py311-x86-torch29.json").write_text('{"package": ', encoding="utf-8")
    monkeypatch.setattr(compatibility, "RECORDS", tmp_path)

    assert any("is no record" in line for line in disagreements(read_runs()))


def test_an_edited_page_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "compatibility.md"
    runs = [run("py311-x86-torch29")]
    page.write_text(render(runs).replace("not run", "1,118 passed", 1), encoding="utf-8")
    monkeypatch.setattr(compatibility, "PAGE", page)

    found = list(disagreements(runs))
    assert any("compatibility.md is not what the records say" in line for line in found)
    page.write_text(render(runs), encoding="utf-8")
    assert not any("compatibility.md" in line for line in disagreements(runs))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TORCHAO_FOR_TORCH", {"2.9": "0.15"}, "tools/constraints has the pairs"),
        (
            "SUPPORTED_VERSIONS",
            {"torch": ">=2.9,<2.17", "torchao": ">=0.15,<0.19"},
            "admits torch >=2.9,<2.17, tools/constraints has <2.16,>=2.9",
        ),
    ],
)
def test_another_promise_at_run_time_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(versions, name, MappingProxyType(value))

    assert any(message in found for found in disagreements(read_runs()))


def test_another_requirement_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"torch": Requirement("torch>=2.8,<2.16")}
    monkeypatch.setattr(compatibility, "requirements", lambda _: asked)

    found = list(compatibility.other_ranges())
    assert "versatil-core does not require torchao" in found
    assert "versatil-passes does not require torchao" not in found
    assert any("versatil-core requires torch" in line for line in found)


def test_the_exit_code_says_whether_something_disagrees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compatibility.py", "--check"])
    monkeypatch.setattr(compatibility, "disagreements", lambda _: iter([]))
    assert compatibility.main() == 0

    monkeypatch.setattr(compatibility, "disagreements", lambda _: iter(["this and that"]))
    assert compatibility.main() == 1
    assert "this and that" in capsys.readouterr().err


def test_new_records_are_taken_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new = tmp_path / "results"
    new.mkdir()
    (new / "py311-x86-torch29.json").write_text(json.dumps(RECORD), encoding="utf-8")
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "compatibility.md")
    monkeypatch.setattr(compatibility, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(sys, "argv", ["compatibility.py", "--collect", str(new)])

    assert compatibility.main() == 0

    assert "1,118 passed" in line((tmp_path / "compatibility.md").read_text("utf-8"), "2.9.1")[4]
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["py311-x86-torch29.json"]
