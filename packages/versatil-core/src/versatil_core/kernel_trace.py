"""Runs the float model and the int8 model in processes of their own, to see what happens in them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.export import ModelInputs
from versatil_core.kernel_log import MARKER, LoggedKernel, read_log
from versatil_core.report_result import FirstResult

_SHOWN_LINES = 3
start = subprocess.Popen


class TraceError(Exception):
    """A process failed; the text says how it ended. Callers tell the user what is missing."""


@dataclass(frozen=True)
class ModelTrace:
    """What the process of one model showed.

    Attributes:
        runs: The kernels of each run, in order.
        first_result: How long the process took until it had a result.
        call_bytes: Memory that a call takes beyond what the process holds; None if unknown.
        process_bytes: The most memory of the process while it runs; None if unknown.
    """

    runs: tuple[tuple[LoggedKernel, ...], ...]
    first_result: FirstResult
    call_bytes: int | None
    process_bytes: int | None


def trace_model(
    kind: str,
    model: str,
    folder: Path,
    call: ModelInputs,
    backend: BasePT2EBackend,
    *,
    threads: int,
) -> ModelTrace:
    """Run a model in a process of its own, with an empty compiler cache.

    Args:
        kind: ``"float"`` or ``"int8"``.
        model: Name of its file in ``folder``: a program that ``torch.export.save`` wrote, or a
            portable file.
        folder: A temporary folder; files are added to it.
        call: Inputs.
        backend: Compiles it; it must be registered, since the process makes its own.
        threads: Threads that torch may use.

    Raises:
        TraceError: The process failed.
    """
    work = folder / kind
    work.mkdir()
    torch.save({"args": call.args, "kwargs": dict(call.kwargs)}, work / "inputs.pt")
    request = {
        "kind": kind,
        "model": str(folder / model),
        "backend": backend.name,
        "options": backend_options(backend),
        "threads": threads,
    }
    (work / "request.json").write_text(json.dumps(request), encoding="utf-8")
    log = _run(work)
    result: dict[str, Any] = json.loads((work / "result.json").read_text(encoding="utf-8"))
    memory = result.pop("call_bytes"), result.pop("process_bytes")
    return ModelTrace(split_runs(log), FirstResult(**result), *memory)


def split_runs(log: str) -> tuple[tuple[LoggedKernel, ...], ...]:
    """Cut a log at its markers; what is before the first and after the last one is no run."""
    parts = log.split(f"{MARKER}\n")[1:-1]
    return tuple(tuple(read_log(part.splitlines())) for part in parts)


def _run(work: Path) -> str:
    """Run the process and return what it logged."""
    own = {"TORCHINDUCTOR_CACHE_DIR": str(work / "cache"), "TMPDIR": str(work)}
    environment = {**os.environ, **own}
    # -P: a file in the working directory must not take the place of a module.
    command = [sys.executable, "-P", "-m", "versatil_core.traced_run", str(work)]
    with (
        (work / "stdout").open("wb") as stdout,
        (work / "stderr").open("wb") as stderr,
        _stopped_afterwards(command, stdout=stdout, stderr=stderr, env=environment) as process,
    ):
        code = process.wait()
    if code or not (work / "result.json").is_file():
        lines = (work / "stderr").read_text(encoding="utf-8", errors="replace").splitlines()
        told = " / ".join(line.strip() for line in lines[-_SHOWN_LINES:] if line.strip())
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise TraceError(f"{how}: {told or 'it said nothing'}")
    return (work / "stdout").read_text(encoding="utf-8", errors="replace")


@contextmanager
def _stopped_afterwards(command: list[str], **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process, and end it with all that it started, however the block is left."""
    process = start(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
