"""A process of its own that compiles one model, runs it, and lets the libraries log their kernels.

``python -m versatil_core.traced_run FOLDER``: reads ``request.json`` and ``inputs.pt`` in the
folder and the model that the request names, and writes ``result.json``. Kernels are logged on stdout, where a line that begins
with `versatil_core.kernel_log.MARKER` opens each run. :mod:`versatil_core.kernel_trace` starts it.
"""

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from versatil_core.compile import compile as compile_int8
from versatil_core.discovery import create_backend
from versatil_core.export import ModelInputs
from versatil_core.kernel_log import MARKER
from versatil_core.saved_reference import load
from versatil_core.speed import compile_float

RUNS = 10


def main(folder: Path) -> None:
    """Do what the request in ``folder`` says."""
    import_seconds = _age()
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    call = ModelInputs(tuple(inputs["args"]), inputs["kwargs"])
    backend = create_backend(request["backend"], request["options"])
    with torch.no_grad():
        start = time.perf_counter()
        model: Any
        if request["kind"] == "int8":
            model = load(request["model"])
        else:
            # Written by the parent; nobody else's file is read here.
            model = torch.export.load(request["model"]).module()
        loaded = time.perf_counter()
        if request["kind"] == "int8":
            compiled: Callable[..., Any] = compile_int8(model, backend)
            compiled(*call.args, **call.kwargs)
        else:
            compiled = compile_float(model, backend, call)
        compiled_at = time.perf_counter()
        total_seconds = _age()

        def run() -> None:
            compiled(*call.args, **call.kwargs)

        run()
        memory = call_memory(run)
        _log_kernels(run)
    result = {
        "import_seconds": import_seconds,
        "load_seconds": loaded - start,
        "compile_seconds": compiled_at - loaded,
        "total_seconds": total_seconds,
        **memory,
    }
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def call_memory(call: Callable[[], object]) -> dict[str, int | None]:
    """Measure how far a call makes this process grow, in bytes; None where the system doesn't tell.

    Linux keeps the largest resident size, and forgets it when "5" is written to ``clear_refs``
    (proc_pid_clear_refs(5)). glibc keeps what earlier calls freed and would give it to this one, which
    then seems to need nothing: it has to hand it back first (malloc_trim(3)).
    """
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    gc.collect()
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "malloc_trim"):
        c_library.malloc_trim(0)
    before = psutil.Process().memory_info().rss
    try:
        clear.write_text("5", encoding="ascii")
        call()
        lines = status.read_text(encoding="ascii").splitlines()
    except OSError:
        return {"call_bytes": None, "process_bytes": None}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    most = int(fields["VmHWM"].split()[0]) * 1024
    return {"call_bytes": max(0, most - before), "process_bytes": most}


def _log_kernels(run: Callable[[], object]) -> None:
    # The libraries print through C's stdout: a marker that Python prints could overtake them.
    c_library = ctypes.CDLL(None)
    with ExitStack() as stack:
        stack.enter_context(torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON))
        if torch.backends.mkl.is_available():
            stack.enter_context(torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON))
        run()  # the first one that logs is slower
        for _ in range(RUNS):
            c_library.puts(MARKER.encode())
            run()
        c_library.puts(MARKER.encode())
    c_library.fflush(None)


def _age() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
