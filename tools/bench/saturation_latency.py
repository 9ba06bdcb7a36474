"""Compare the latency of saturation-safe weights with that of reduce_range.

    cd tools && python -m bench.saturation_latency --model minilm --threads 2

Both are compiled, in one process, and take turns in one interleaved run. A second model with
reduce_range takes part: how far its ratio is from 1 is what the measurement itself is worth.
stdout is the result, stderr the progress.
"""

import argparse
import json
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.bench_models import MODELS
from bench.machine import cpu_text
from versatil_core import compile as compile_int8
from versatil_core import quantize
from versatil_core.latency import LatencyComparison, measure_interleaved, timed
from versatil_core.progress import StageProgress
from versatil_x86 import X86InductorBackend

TRUTH = "reduce_range"
CONTROL = "reduce_range again"
CANDIDATES = {TRUTH: "reduce_range", CONTROL: "reduce_range", "safe": "safe"}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="minilm")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with StageProgress(Console(stderr=True)) as progress:
        result = to_dict(arguments.model, measure(arguments.model, arguments.rounds, progress))
    if arguments.json:
        print(json.dumps(result, indent=2, allow_nan=False))
        return
    Console(highlight=False).print(table(result))
    print(f"{cpu_text()}, threads: {arguments.threads}")
    print(f"torch {torch.__version__}, {arguments.rounds} rounds")


def measure(model: str, rounds: int, progress: StageProgress) -> LatencyComparison:
    """Quantize and compile one model in each way, then let them take turns."""
    bench = MODELS[model]()
    turns = {}
    for name, saturation in CANDIDATES.items():
        backend = X86InductorBackend(saturation=saturation)
        with progress.stage(f"{model}: {name}, quantize and compile"):
            reference = quantize(bench.model, bench.example, backend, bench.calibration)
            compiled = compile_int8(reference, backend)
            turns[name] = timed(lambda compiled=compiled: compiled(*bench.example))  # type: ignore[misc]
    with progress.stage(f"{model}: measure", total=rounds) as advance:
        return measure_interleaved(turns, rounds=rounds, on_round=advance)


def to_dict(model: str, latency: LatencyComparison) -> dict[str, Any]:
    """Return JSON values: seconds per call, and each candidate's ratio to reduce_range."""
    return {
        "model": model,
        "candidates": {
            name: {
                "latency_seconds": summary.median,
                "latency_seconds_middle_half": summary.quartiles,
                "latency_over_reduce_range": latency.ratio(name, TRUTH),
                "latency_over_reduce_range_middle_half": latency.ratio_quartiles(name, TRUTH),
            }
            for name, summary in latency.by_name.items()
        },
    }


def table(result: dict[str, Any]) -> Table:
    """Show the comparison, in 80 columns."""
    shown = Table(title=result["model"], title_justify="left", show_edge=False, pad_edge=False)
    shown.add_column("saturation")
    for heading in ("median", "middle half", "ratio", "middle half"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, values in result["candidates"].items():
        low, high = values["latency_seconds_middle_half"]
        least, most = values["latency_over_reduce_range_middle_half"]
        shown.add_row(
            name,
            f"{values['latency_seconds'] * 1e3:.2f} ms",
            f"{low * 1e3:.2f} to {high * 1e3:.2f}",
            f"{values['latency_over_reduce_range']:.3f}",
            f"{least:.3f} to {most:.3f}",
        )
    return shown


if __name__ == "__main__":
    main()
