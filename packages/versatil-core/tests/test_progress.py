"""Progress is for people: plain lines in a log, nothing when it is off."""

import io

import pytest
from rich.console import Console

from versatil_core.progress import StageProgress


def console(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=is_terminal, width=80), stream


def test_a_log_gets_one_line_per_finished_stage() -> None:
    shown, stream = console(is_terminal=False)
    with StageProgress(shown) as progress:
        with progress.stage("train [bold]", total=2) as advance:
            advance()
            advance()
        with progress.stage("compile"):
            pass
    lines = stream.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["train [bold]", "compile"]
    assert lines[0].endswith(" s")


def test_a_terminal_shows_finished_stages_with_a_tick() -> None:
    shown, stream = console(is_terminal=True)
    with StageProgress(shown) as progress:
        with progress.stage("train", total=4) as advance:
            advance()
        with progress.stage("compile"):
            pass
    last_frame = stream.getvalue().rsplit("\x1b[1A", maxsplit=1)[-1]
    assert stream.getvalue().count("✓") >= 2
    assert "compile" in last_frame


def test_a_failed_stage_is_not_shown_as_done() -> None:
    shown, stream = console(is_terminal=False)
    with pytest.raises(RuntimeError), StageProgress(shown) as progress, progress.stage("train"):
        raise RuntimeError
    assert stream.getvalue() == ""


def test_off_means_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with StageProgress(None) as progress, progress.stage("train", total=1) as advance:
        advance()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
