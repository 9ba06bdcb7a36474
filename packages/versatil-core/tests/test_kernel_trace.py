"""Processes of their own: their logs, their failures, and that none is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from versatil_core import kernel_trace
from versatil_core.export import ModelInputs
from versatil_core.kernel_trace import TraceError, split_runs, trace_model
from versatil_core.traced_run import call_memory

LINE = "MKL_VERBOSE SGEMM(T,N,16,4,512,0x7f,0x5f,16,0x5f,4,0x7f,0x5f,4) 2.50us CNR:OFF"


def test_split_runs() -> None:
    other = LINE.replace("SGEMM", "DGEMM")
    marker = "versatil_run"
    log = f"{LINE}\n{marker}\n{LINE}\n{other}\n{marker}\n{LINE}\n{marker}\n{LINE}\n"

    first, second = split_runs(log)

    assert [kernel.primitive for kernel in first] == ["SGEMM", "DGEMM"]
    assert [kernel.primitive for kernel in second] == ["SGEMM"]
    assert split_runs("") == ()


def test_call_memory() -> None:
    megabytes = 200

    def call() -> None:
        _ = bytearray(os.urandom(1)) * (megabytes << 20)

    memory = call_memory(call)
    call_bytes, process_bytes = memory["call_bytes"], memory["process_bytes"]

    assert call_bytes is not None
    assert process_bytes is not None
    assert call_bytes > (megabytes // 2) << 20
    assert process_bytes >= call_bytes


def test_memory_that_earlier_calls_freed_counts() -> None:
    """Small blocks stay in glibc's heap when they are freed, so that a second call takes no new ones."""
    block, blocks = 60_000, 1_000

    def call() -> None:
        kept = [bytearray(os.urandom(1)) * block for _ in range(blocks)]
        # What is allocated last keeps the heap from shrinking by itself.
        held.append(bytearray(block))
        del kept

    held: list[bytearray] = []
    call()
    call_bytes = call_memory(call)["call_bytes"]

    assert call_bytes is not None
    assert call_bytes > block * blocks // 2


def test_memory_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refused)
    assert call_memory(list) == {"call_bytes": None, "process_bytes": None}


@pytest.fixture
def traced(
    tmp_path: Path, linear_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Any]:
    """Trace with another program in the place of ours."""

    def run(code: str) -> Any:
        def started(command: list[str], **options: Any) -> Any:
            program = [sys.executable, "-c", code, command[-1]]
            return subprocess.Popen(program, **options)

        monkeypatch.setattr(kernel_trace, "start", started)
        (tmp_path / "int8.pt2").write_bytes(b"model")
        call = ModelInputs((), {})
        return trace_model("int8", "int8.pt2", tmp_path, call, linear_backend(), threads=3)

    return run


RESULT = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
request = json.loads((folder / "request.json").read_text())
assert pathlib.Path(request["model"]).read_bytes() == b"model"
assert request["threads"] == 3 and request["backend"] == "test_linear", request
names = ["import_seconds", "load_seconds", "compile_seconds", "total_seconds"]
result = dict.fromkeys(names, 1.0) | {"call_bytes": 5, "process_bytes": None}
(folder / "result.json").write_text(json.dumps(result))
print("versatil_run")
print("LINE")
print("versatil_run")
"""


def test_what_a_process_tells(traced: Callable[[str], Any]) -> None:
    trace = traced(RESULT.replace("LINE", LINE))

    [[kernel]] = trace.runs
    assert kernel.primitive == "SGEMM"
    assert trace.first_result.total_seconds == 1.0
    assert (trace.call_bytes, trace.process_bytes) == (5, None)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ValueError('no such thing')", "exit code 1: .*ValueError: no such thing"),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL: it said nothing"),
        ("pass", "exit code 0: it said nothing"),
    ],
)
def test_a_process_that_fails(traced: Callable[[str], Any], code: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        traced(code)


def test_ctrl_c_ends_the_process_and_all_it_started(
    traced: Callable[[str], Any], tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(pids)!r})\n"
        "time.sleep(600)\n"
    )

    def interrupt() -> None:
        while not pids.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        traced(code)

    started = [int(pid) for pid in pids.read_text(encoding="ascii").split()]
    assert len(started) == 2
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in started if psutil.pid_exists(pid)], timeout=30
    )
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
