"""One flow in a process of its own: prepares the model, then runs it whenever it is asked.

A process each, because importing torchao's quantizer registers patterns for a whole process:
in one process they would take part in ours, too.
"""

import os
import re
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.bench_models import MODELS
from bench.flows import FLOWS, Model, NotAvailableError

INT8_RUN = re.compile(
    r"primitive,exec,cpu,(?:convolution|matmul|inner_product),.*src:[us]8.*wei:s8"
)


@dataclass(frozen=True)
class Report:
    """What a worker says before it is timed.

    Attributes:
        quantize_seconds: Export, calibration and conversion.
        compile_seconds: Until the first call has returned.
        int8_kernels: Int8 convolutions and matrix products that oneDNN ran in one call.
        layers: Linear and convolution modules of the model.
        output: Of the compiled model for the example inputs.
        reference: Of the quantized graph for the same inputs.
    """

    quantize_seconds: float
    compile_seconds: float
    int8_kernels: int
    layers: int
    output: np.ndarray[Any, Any]
    reference: np.ndarray[Any, Any]


def serve(connection: Connection, flow: str, model: str, threads: int) -> None:
    """Prepare ``model`` by ``flow``, send a `Report`, then time one call for each request.

    If the flow can't run the model here, the reason is sent instead, and that is all.

    Args:
        connection: Receives True for "run once more", False for "stop".
        flow: Key of `FLOWS`.
        model: Key of `MODELS`.
        threads: Threads for torch.
    """
    torch.set_num_threads(threads)
    bench = MODELS[model]()
    with tempfile.TemporaryDirectory() as cache, torch.no_grad():
        # Without it, a flow whose kernels an earlier run left behind would compile in no time.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        try:
            prepared = FLOWS[flow](bench)
        except NotAvailableError as error:
            connection.send(str(error))
            return
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
        report = Report(
            prepared.quantize_seconds,
            prepared.compile_seconds,
            count_int8_kernels(prepared.compiled, bench.example),
            sum(isinstance(module, kinds) for module in bench.model.modules()),
            prepared.compiled(*bench.example).numpy(),
            prepared.reference(*bench.example).numpy(),
        )
        connection.send(report)
        while connection.recv():
            start = time.perf_counter()
            prepared.compiled(*bench.example)
            connection.send(time.perf_counter() - start)


def count_int8_kernels(model: Model, example: tuple[torch.Tensor, ...]) -> int:
    """Run ``model`` once and count the int8 kernels in oneDNN's own log.

    It counts what ran, whoever generated the code and in whichever language. The log goes to
    file descriptor 1, so that is turned into a file meanwhile.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "onednn.log"
        stdout = os.dup(1)
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                model(*example)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
            os.close(file)
        return sum(INT8_RUN.search(line) is not None for line in log.read_text().splitlines())
