"""Progress of a long job, on stderr: a live line per stage, or plain lines in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["StageProgress"]

Advance = Callable[[], None]


class StageProgress:
    """Shows the stages of a job, each with a bar if its length is known.

    In a terminal the stages are live lines with the elapsed time; elsewhere (a log, a
    pipe) each finished stage is one plain line.

    Args:
        console: Where to show it; None shows nothing.

    Example:
        >>> with StageProgress(None) as progress, progress.stage("train", total=2) as advance:
        ...     advance()
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._live: Progress | None = None
        if console is not None and console.is_terminal:
            self._live = Progress(
                SpinnerColumn(finished_text="[green]✓[/green]"),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                console=console,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def stage(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """Show one stage while the body runs.

        Args:
            description: What happens, for people.
            total: Number of steps; None if unknown, then the bar only shows life.

        Yields:
            A function to call after each step.
        """
        start = time.perf_counter()
        if self._live is None:
            yield _ignore
            if self._console is not None:
                seconds = time.perf_counter() - start
                self._console.print(
                    f"{description}: {seconds:.1f} s", highlight=False, markup=False
                )
            return
        live = self._live
        task = live.add_task(description, total=total)
        yield lambda: live.advance(task)
        # Only after success: a stage that failed keeps its unfinished bar.
        steps = live.tasks[task].total or 1
        live.update(task, total=steps, completed=steps)


def _ignore() -> None:
    pass
