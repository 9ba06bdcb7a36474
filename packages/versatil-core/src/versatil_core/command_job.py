"""What each command has in common: its errors, its warnings, and torch's noise kept out."""

import contextlib
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

import typer
from rich.console import Console

from versatil_passes.errors import VersatilError

__all__ = ["job"]

# Their warnings are about their own insides; a user of the command can't act on them.
FOREIGN_MODULES = r"(torch|torchao|transformers|sklearn|copyreg|importlib)\b"


@contextmanager
def job(*, is_verbose: bool) -> Iterator[Console]:
    """Run the body of a command.

    A `VersatilError` ends the command with exit code 1 and one line on stderr. Warnings of
    torch and torchao are left out, ours are shown. With ``is_verbose``, the traceback and
    all warnings are shown too.

    Args:
        is_verbose: Leave nothing out.

    Yields:
        The console on stderr, for progress.
    """
    console = Console(stderr=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(_warnings_shown_on(console, is_verbose=is_verbose))
            if not is_verbose:
                stack.enter_context(_foreign_logs_hidden())
            yield console
    except VersatilError as error:
        if is_verbose:
            traceback.print_exc(file=sys.stderr)
        _print_plain(console, f"error: {error}")
        raise typer.Exit(1) from error


@contextmanager
def _warnings_shown_on(console: Console, *, is_verbose: bool) -> Iterator[None]:
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        del category, file, line
        where = f" ({filename}:{lineno})" if is_verbose else ""
        _print_plain(console, f"warning: {message}{where}")

    with warnings.catch_warnings():
        if not is_verbose:
            warnings.filterwarnings("ignore", module=FOREIGN_MODULES)
        warnings.showwarning = show
        yield


class _OursOnly(logging.Filter):
    """Lets the records of versatil's packages pass, and of others only errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.startswith("versatil_") or record.levelno >= logging.ERROR


@contextmanager
def _foreign_logs_hidden() -> Iterator[None]:
    import torch  # noqa: F401 -- its import makes the handlers that the filter goes on

    ours = _OursOnly()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root = logging.getLogger()
    handlers = [handler, *_torch_handlers()]
    root.addHandler(handler)
    for each in handlers:
        each.addFilter(ours)
    try:
        yield
    finally:
        for each in handlers:
            each.removeFilter(ours)
        root.removeHandler(handler)


def _torch_handlers() -> list[logging.Handler]:
    """Find the handlers that torch gives its loggers: several of them have their own."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger)
    ]
    return list(dict.fromkeys(handler for logger in loggers for handler in logger.handlers))


def _print_plain(console: Console, text: str) -> None:
    """Print text as it is: no markup, no colours, no line breaks of rich's making."""
    with contextlib.suppress(BrokenPipeError):
        console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
