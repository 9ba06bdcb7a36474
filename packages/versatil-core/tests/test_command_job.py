"""Errors, warnings and noise of a command, and that all of it is put back."""

import logging
import warnings
from pathlib import Path

import pytest
import torch
import typer

from versatil_core.command_job import job
from versatil_passes.errors import VersatilError


def warn_as(module: str, message: str) -> None:
    warnings.warn_explicit(message, UserWarning, f"{module}.py", 3, module=module, registry={})


def test_an_error_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, job(is_verbose=False):
        raise VersatilError("a [bold] problem " + "long " * 40 + "end")
    assert caught.value.exit_code == 1
    captured = capsys.readouterr()
    assert captured.err == "error: a [bold] problem " + "long " * 40 + "end\n"
    assert captured.out == ""


def test_verbose_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), job(is_verbose=True):
        raise VersatilError("problem")
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("error: problem\n")


def test_a_bug_is_not_disguised() -> None:
    with pytest.raises(ZeroDivisionError), job(is_verbose=False):
        raise ZeroDivisionError


@pytest.mark.filterwarnings("default")  # as in the command, where pytest makes them errors
@pytest.mark.parametrize("module", ["torch.fx.graph", "torchao", "transformers.modeling"])
def test_foreign_warnings_are_left_out(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with job(is_verbose=False):
        warn_as(module, "about my insides")
        warn_as("versatil_x86.backend", "this CPU has no VNNI")
        warn_as("torchless", "of the user's own model")
    assert capsys.readouterr().err.splitlines() == [
        "warning: this CPU has no VNNI",
        "warning: of the user's own model",
    ]


@pytest.mark.filterwarnings("default")
def test_verbose_shows_foreign_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with job(is_verbose=True):
        warn_as("torch.fx.graph", "about my insides")
    assert capsys.readouterr().err == "warning: about my insides (torch.fx.graph.py:3)\n"


def test_foreign_logs_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with job(is_verbose=False):
        logging.getLogger("torchao").warning("Failed to load a library")
        logging.getLogger("torch._inductor.codecache").warning("cannot cache")
        logging.getLogger("torchao").error("really broken")
        logging.getLogger("versatil_core.compile").warning("of interest")
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines == ["ERROR: really broken", "WARNING: of interest"]


def test_everything_is_put_back_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> list[object]:
        names = [None, "torch", "torch._inductor", "torch._dynamo", "torchao"]
        loggers = [logging.getLogger(name) for name in names]
        handlers = [(list(logger.handlers), logger.level) for logger in loggers]
        filters = [list(h.filters) for logger in loggers for h in logger.handlers]
        return [handlers, filters, warnings.showwarning, list(warnings.filters)]

    assert torch.__version__  # imported before the first look: its import makes handlers
    before = state()
    with pytest.raises(typer.Exit), job(is_verbose=False):
        raise VersatilError("problem")
    assert state() == before
    assert capsys.readouterr().err


def test_importing_the_command_is_quiet_about_nothing_global() -> None:
    # The noise is kept out while a command runs, never by importing the module.
    text = Path(job.__code__.co_filename).read_text(encoding="utf-8")
    outside = [line for line in text.splitlines() if line.startswith(("logging.", "warnings."))]
    assert outside == []
