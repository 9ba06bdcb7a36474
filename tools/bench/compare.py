"""Compare versatil with plain torchao and with float, on the same models.

    cd tools && python -m bench.compare --model resnet50 --threads 2

It runs on x86 and on Arm, with the installed backend of the machine. Each flow has a process of its own. They take turns in one interleaved run, so that they meet
the same moods of the machine. stdout is the result, stderr the progress.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bench.bench_models import MODELS
from bench.flows import FLOWS, default_flows
from bench.machine import cpu_text
from bench.worker import Report, serve
from versatil_core import sqnr_db
from versatil_core.latency import LatencyComparison, measure_interleaved
from versatil_core.progress import StageProgress

# OpenMP's threads spin for a moment after their work; the next flow should not meet them.
REST_SECONDS = 0.02
WARM_UP_TURNS = 3


@dataclass(frozen=True)
class Comparison:
    """What was measured on one model.

    Attributes:
        model: Its name.
        reports: One for each flow that ran.
        latency: Of those flows.
        not_available: Why the others did not run.
    """

    model: str
    reports: dict[str, Report]
    latency: LatencyComparison
    not_available: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: one entry per flow, ours against float, and against torchao's if that ran."""
        low, high = self.latency.ratio_quartiles("float", "versatil")
        compared = {
            "model": self.model,
            "flows": {flow: self._flow(flow) for flow in self.reports},
            "not_available": self.not_available,
            "float_latency_over_versatil": self.latency.ratio("float", "versatil"),
            "float_latency_over_versatil_middle_half": [low, high],
        }
        if "torchao" not in self.reports:
            return compared
        low, high = self.latency.ratio_quartiles("versatil", "torchao")
        return compared | {
            "versatil_latency_over_torchao": self.latency.ratio("versatil", "torchao"),
            "versatil_latency_over_torchao_middle_half": [low, high],
            "references_sqnr_db": self._sqnr("versatil", "reference", "torchao", "reference"),
            "outputs_sqnr_db": self._sqnr("versatil", "output", "torchao", "output"),
        }

    def _flow(self, flow: str) -> dict[str, Any]:
        report, latency = self.reports[flow], self.latency.by_name[flow]
        return {
            "int8_kernels": report.int8_kernels,
            "layers": report.layers,
            "sqnr_float_db": self._sqnr(flow, "output", "float", "reference"),
            "reference_sqnr_float_db": self._sqnr(flow, "reference", "float", "reference"),
            "sqnr_reference_db": self._sqnr(flow, "output", flow, "reference"),
            "latency_seconds": latency.median,
            "latency_seconds_middle_half": latency.quartiles,
            "quantize_seconds": report.quantize_seconds,
            "compile_seconds": report.compile_seconds,
        }

    def _sqnr(self, flow: str, what: str, truth_flow: str, truth_what: str) -> float | None:
        """None where they are equal: JSON has no infinity."""
        value = sqnr_db(
            torch.from_numpy(getattr(self.reports[flow], what)),
            torch.from_numpy(getattr(self.reports[truth_flow], truth_what)),
        )
        return None if value == float("inf") else value


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument(
        "--flows",
        type=_flows,
        default=default_flows(),
        help=f"default: {','.join(default_flows())}; float and versatil are always among them",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    with StageProgress(Console(stderr=True)) as progress:
        for model in arguments.model or MODELS:
            compared = compare(
                model, arguments.flows, arguments.threads, arguments.rounds, progress
            )
            results.append(compared.to_dict())
            if not arguments.json:
                Console(highlight=False).print(table(results[-1]))
    if arguments.json:
        print(json.dumps(results, indent=2, allow_nan=False))
    else:
        print(f"{cpu_text()}, threads: {arguments.threads}, torch {torch.__version__}")


def _flows(text: str) -> list[str]:
    """Read ``a,b``; every number is compared with float's or ours, so these are added."""
    given = {"float", "versatil", *text.split(",")}
    if unknown := sorted(given - FLOWS.keys()):
        raise argparse.ArgumentTypeError(f"no flow {unknown[0]!r}; there are {', '.join(FLOWS)}")
    return [flow for flow in FLOWS if flow in given]


def compare(
    model: str, flows: Sequence[str], threads: int, rounds: int, progress: StageProgress
) -> Comparison:
    """Prepare one model by every flow, then let those that can run it take turns."""
    with _workers(model, flows, threads) as connections:
        reports: dict[str, Report] = {}
        not_available: dict[str, str] = {}
        for flow, connection in connections.items():
            with progress.stage(f"{model}: {flow}, prepare"):
                connection.send(True)
                answer = _receive(connection, flow)
                if isinstance(answer, Report):
                    reports[flow] = answer
                else:
                    not_available[flow] = answer
        turns = {flow: _turn(connections[flow], flow) for flow in reports}
        for _ in range(WARM_UP_TURNS):
            for turn in turns.values():
                turn()
        with progress.stage(f"{model}: measure", total=rounds) as advance:
            latency = measure_interleaved(turns, rounds=rounds, on_round=advance)
    return Comparison(model, reports, latency, not_available)


def table(result: dict[str, Any]) -> Group:
    """Show one comparison, in 80 columns."""
    shown = Table(title=result["model"], title_justify="left", show_edge=False, pad_edge=False)
    shown.add_column("flow")
    for heading in ("int8", "to float", "to ref.", "latency", "quantize", "compile"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for flow, values in result["flows"].items():
        is_float = flow == "float"
        shown.add_row(
            flow,
            "" if is_float else f"{values['int8_kernels']} of {values['layers']}",
            "" if is_float else _decibel(values["sqnr_float_db"]),
            "" if is_float else _decibel(values["sqnr_reference_db"]),
            f"{values['latency_seconds'] * 1e3:.1f} ms",
            "" if is_float else f"{values['quantize_seconds']:.1f} s",
            f"{values['compile_seconds']:.1f} s",
        )
    low, high = result["float_latency_over_versatil_middle_half"]
    speedup = result["float_latency_over_versatil"]
    compared = [
        *(f"{flow}: not available: {why}" for flow, why in result["not_available"].items()),
        f"latency of float {speedup:.2f} of ours (middle half of the turns {low:.2f} to {high:.2f})",
        f"reference to float {_decibel(result['flows']['versatil']['reference_sqnr_float_db'])}",
    ]
    if "torchao" in result["flows"]:
        low, high = result["versatil_latency_over_torchao_middle_half"]
        ours = result["versatil_latency_over_torchao"]
        compared += [
            f"latency {ours:.3f} of torchao's (middle half of the turns {low:.3f} to {high:.3f})",
            f"against torchao's: reference {_decibel(result['references_sqnr_db'])}",
            f"against torchao's: output {_decibel(result['outputs_sqnr_db'])}",
        ]
    return Group(shown, *map(Text, compared), Text())


@contextmanager
def _workers(model: str, flows: Sequence[str], threads: int) -> Iterator[dict[str, Connection]]:
    """Start one process per flow; each waits until it is asked to prepare."""
    context = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    for flow in flows:
        connections[flow], theirs = context.Pipe()
        process = context.Process(target=_start, args=(theirs, flow, model, threads), daemon=True)
        process.start()
        theirs.close()  # so that a worker that dies ends our waiting
        processes.append(process)
    try:
        yield connections
    finally:
        for connection in connections.values():
            connection.close()
        for process in processes:
            process.join(timeout=10)
            process.terminate()


def _start(connection: Connection, flow: str, model: str, threads: int) -> None:
    try:
        connection.recv()  # one prepares at a time, so that the compile times are honest
        serve(connection, flow, model, threads)
    except EOFError:  # the parent is done, or gone
        os._exit(0)


def _receive(connection: Connection, flow: str) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise SystemExit(f"the process of {flow} died; its own message is above") from None


def _turn(connection: Connection, flow: str) -> Callable[[], float]:
    def turn() -> float:
        time.sleep(REST_SECONDS)
        connection.send(True)
        seconds: float = _receive(connection, flow)
        return seconds

    return turn


def _decibel(value: float | None) -> str:
    return "equal" if value is None else f"{value:.1f} dB"


if __name__ == "__main__":
    main()
