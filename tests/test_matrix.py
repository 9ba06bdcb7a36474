"""The matrix: what a cell's name says, where its torch comes from, what it does when the disk is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import matrix_cell
import torch_builds
from matrix_cell import CONSTRAINTS, Cell
from torch_builds import NoRoomError

ROOT = Path(__file__).resolve().parent.parent


def test_a_name_says_it_all() -> None:
    cell = Cell.parse("py311-x86-torch210")

    assert (cell.package, cell.constraints.name) == ("versatil-x86", "torch-2.10.txt")
    assert not cell.is_oldest
    assert not cell.may_be_left_out


@pytest.mark.parametrize(("end", "file"), [("oldest", CONSTRAINTS[0]), ("latest", CONSTRAINTS[-1])])
def test_the_ends(end: str, file: Path) -> None:
    cell = Cell.parse(f"py312-core-{end}")

    assert cell.constraints == file
    assert cell.is_oldest is (end == "oldest")
    assert cell.may_be_left_out


@pytest.mark.parametrize("name", ["py311-gpu-torch213", "py311-x86-torch28", "x86", "lint"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the packages are"):
        Cell.parse(name)


def test_versions_are_in_order() -> None:
    """As numbers: 2.9 comes before 2.10."""
    minors = [int(path.stem.partition("2.")[2]) for path in CONSTRAINTS]

    assert minors == sorted(minors)
    assert minors[0] == 9


def test_a_package_comes_with_its_siblings() -> None:
    assert matrix_cell.with_siblings("versatil-passes") == ["versatil-passes"]
    assert matrix_cell.with_siblings("versatil-x86") == [
        "versatil-passes",
        "versatil-core",
        "versatil-x86",
    ]


def test_floors_are_the_oldest_promised() -> None:
    floors = matrix_cell.floors(matrix_cell.with_siblings("versatil-x86"))

    assert [floor.partition("==")[0] for floor in floors] == sorted(
        {"jinja2", "numpy", "packaging", "psutil", "py-cpuinfo", "rich", "typer"}
    )
    typer = matrix_cell.requirements("versatil-core")["typer"]
    assert [f">={floor.partition('==')[2]}" for floor in floors if "typer" in floor] == [
        str(typer.specifier)
    ]


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_each_file_has_a_pair(path: Path) -> None:
    assert torch_builds.read_pair(path).torch.startswith(path.stem.removeprefix("torch-") + ".")


@pytest.mark.parametrize("text", ["torch==2.9.1", "torch>=2.9\ntorchao==0.15.0", "numpy==2.0"])
def test_anything_else_is_no_pair(tmp_path: Path, text: str) -> None:
    (tmp_path / "torch-2.9.txt").write_text(text, encoding="utf-8")

    with pytest.raises(ValueError, match=r"expected torch==\.\.\. and torchao==\.\.\."):
        torch_builds.read_pair(tmp_path / "torch-2.9.txt")


@pytest.fixture
def builds(tmp_path: Path) -> Path:
    """A folder with two builds, and half of one that was interrupted."""
    for name in ("cpython-311-torch-2.9.1", "cpython-311-torch-2.15.0", "unfinished-abc"):
        (tmp_path / name / "torch").mkdir(parents=True)
    return tmp_path


def test_nothing_else_is_deleted(builds: Path) -> None:
    (builds / "my-torch-notes").mkdir()
    (builds / "tmp-notes.txt").touch()

    torch_builds.remove_builds(builds)

    assert {path.name for path in builds.iterdir()} == {"my-torch-notes", "tmp-notes.txt"}


def test_a_build_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = torch_builds.read_pair(CONSTRAINTS[0])
    there = tmp_path / f"{sys.implementation.cache_tag}-torch-{pair.torch}"
    there.mkdir()
    monkeypatch.setattr(torch_builds, "pip", lambda *_: pytest.fail("it installs again"))

    assert torch_builds.provide(tmp_path, CONSTRAINTS[0]) == there


def test_builds_stay_while_there_is_room(monkeypatch: pytest.MonkeyPatch, builds: Path) -> None:
    monkeypatch.setattr(torch_builds, "free_gb", lambda _: 15.1)

    torch_builds.make_room(builds, 15)

    assert len(list(builds.iterdir())) == 3


def test_builds_go_when_there_is_none(monkeypatch: pytest.MonkeyPatch, builds: Path) -> None:
    monkeypatch.setattr(
        torch_builds, "free_gb", lambda folder: 20 - 6 * len(list(folder.iterdir()))
    )

    torch_builds.make_room(builds, 15)

    assert not list(builds.iterdir())


def test_a_full_disk_installs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_builds, "free_gb", lambda _: 14.2)
    monkeypatch.setattr(torch_builds, "has_local_cpu_build", lambda _: False)
    monkeypatch.setattr(torch_builds, "pip", lambda *_: pytest.fail("it installs"))

    with pytest.raises(NoRoomError, match=r"14\.2 GB are free .* 15 GB"):
        torch_builds.provide(tmp_path, CONSTRAINTS[0])


def test_a_cpu_build_takes_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed: list[tuple[object, ...]] = []

    def pip(*arguments: object) -> None:
        installed.append(arguments)
        Path(str(arguments[arguments.index("--target") + 1])).mkdir()

    monkeypatch.setattr(torch_builds, "free_gb", lambda _: 14.2)
    monkeypatch.setattr(torch_builds, "has_local_cpu_build", lambda _: True)
    monkeypatch.setattr(torch_builds, "pip", pip)

    assert torch_builds.provide(tmp_path, CONSTRAINTS[0]).is_dir()
    assert len(installed) == 1


def run_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, *arguments: str, is_full: bool
) -> tuple[int | str | None, list[list[str]]]:
    """Run a cell without installing or testing anything: what would pytest have got?"""
    ran: list[list[str]] = []

    def prepare(_: Cell, __: Path) -> None:
        if is_full:
            raise NoRoomError("14.2 GB are free")

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(matrix_cell, "prepare", prepare)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(
        sys, "argv", ["matrix_cell.py", name, "--work", str(tmp_path), "--", *arguments]
    )
    try:
        return matrix_cell.main(), ran
    except SystemExit as stopped:
        return stopped.code, ran


def test_a_cell_runs_all_tests_of_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, ran = run_cell(monkeypatch, tmp_path, "py311-core-torch29", is_full=False)

    assert code == 7  # pytest's
    assert [command[-1] for command in ran] == ["worksteal"]
    assert "packages/versatil-core/tests" in ran[0]


def test_a_cell_runs_those_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As CONTRIBUTING.md has it."""
    _, ran = run_cell(monkeypatch, tmp_path, "py311-x86-torch213", "-k", "freezing", is_full=False)

    assert ran[0][-3:] == ["packages/versatil-x86/tests", "-k", "freezing"]


def test_an_earlier_record_is_no_result_of_this_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = tmp_path / "results" / "py311-x86-latest.json"
    record.parent.mkdir()
    record.touch()

    run_cell(monkeypatch, tmp_path, "py311-x86-latest", is_full=True)

    assert not record.exists()


def test_an_unknown_name_says_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run_cell(monkeypatch, tmp_path, "py311-x86-torch28", is_full=False)

    assert code == 2
    assert "the packages are" in capsys.readouterr().err


def test_a_full_disk_is_said_aloud_where_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = run_cell(monkeypatch, tmp_path, "py311-x86-latest", is_full=True)

    assert (code, ran) == (0, [])
    assert "LEFT OUT, NOT TESTED: py311-x86-latest: 14.2 GB are free" in capsys.readouterr().out


def test_a_full_disk_fails_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, ran = run_cell(monkeypatch, tmp_path, "py311-x86-torch29", is_full=True)

    assert (code, ran) == ("py311-x86-torch29 is not run: 14.2 GB are free", [])
