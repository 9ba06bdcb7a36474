"""Measure int8 with float parts in bfloat16 against int8 with float parts in float32.

    cd tools && python -m bench.bfloat16

MiniLM has its real weights and real sentences; ResNet-50 has random weights, so that its accuracy means
nothing. The compiled models take turns. stdout is the result, stderr the progress.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from bench.bench_models import MODELS, BenchModel
from bench.machine import cpu_text
from versatil_core import audit, check_exactness, quantize, sqnr_db
from versatil_core import compile as compile_int8
from versatil_core.latency import Timing, measure_interleaved, timed
from versatil_core.progress import StageProgress
from versatil_x86 import X86InductorBackend

FLOAT_DTYPES = ("float32", "bfloat16")
COMPARED = ("minilm", "resnet50")


@dataclass(frozen=True)
class Row:
    """One model, static or dynamic, with one dtype.

    Attributes:
        reference_db: SQNR of the reference against float, over all held-out outputs together.
        compiled_db: The same of the compiled model.
        int8_layers: Layers that run as int8.
        exact_ops: Ops of the compiled model that are exact when fed the reference's own inputs.
        ops: Ops that were compared so.
        latency: Median over the rounds of its time over that with float32.
        latency_low: Lower quartile of the same.
        latency_high: Upper quartile of the same.
    """

    reference_db: float
    compiled_db: float
    int8_layers: int
    exact_ops: int
    ops: int
    latency: float
    latency_low: float
    latency_high: float


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=COMPARED, choices=[*MODELS, []])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {}
    with StageProgress(Console(stderr=True)) as progress, torch.no_grad():
        for name in arguments.models:
            with progress.stage(f"load {name}"):
                bench = MODELS[name]()
            for mode in ("static", "dynamic"):
                is_dynamic = mode == "dynamic"
                title = f"{name}, {mode}"
                results[title] = measure(bench, title, is_dynamic, arguments.rounds, progress)
    if arguments.json:
        rows = {
            title: {dtype: asdict(row) for dtype, row in ways.items()}
            for title, ways in results.items()
        }
        print(json.dumps(rows, indent=2))
    else:
        Console(highlight=False).print(table(results))
        print(f"{cpu_text()}, {torch.get_num_threads()} threads, torch {torch.__version__}")


def measure(
    bench: BenchModel, title: str, is_dynamic: bool, rounds: int, progress: StageProgress
) -> dict[str, Row]:
    """Quantize with each dtype, and let the compiled models take turns."""
    truth = _outputs(bench.model, bench)
    made, calls = {}, {}
    for dtype in FLOAT_DTYPES:
        with progress.stage(f"{title}, {dtype}"):
            backend = X86InductorBackend.for_host(is_dynamic=is_dynamic, float_dtype=dtype)
            reference = quantize(bench.model, bench.example, backend, bench.calibration)
            compiled = compile_int8(reference, backend)
            made[dtype] = backend, reference, compiled
            calls[dtype] = timed(partial(compiled, *bench.example))
    with progress.stage(f"{title}: measure", total=rounds) as advance:
        times = measure_interleaved(calls, rounds=rounds, on_round=advance)
    rows = {}
    for dtype, (backend, reference, compiled) in made.items():
        with progress.stage(f"{title}, {dtype}: compare"):
            exactness = check_exactness(reference, compiled, bench.example)
            timing: Timing = times.ratio_timing(dtype, "float32")
            rows[dtype] = Row(
                reference_db=sqnr_db(_outputs(reference, bench), truth),
                compiled_db=sqnr_db(_outputs(compiled, bench), truth),
                int8_layers=audit(reference, backend).int8_count,
                exact_ops=len(exactness.ops) - len(exactness.disagreements),
                ops=len(exactness.ops),
                latency=timing.median,
                latency_low=timing.low,
                latency_high=timing.high,
            )
    return rows


def table(results: dict[str, dict[str, Row]]) -> Table:
    """Show all, in 80 columns."""
    shown = Table(show_edge=False, pad_edge=False)
    shown.add_column("")
    headings = ("refe-\nrence", "com-\npiled", "int8", "ops\nexact", "latency", "middle\nhalf")
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True, min_width=6)
    for title, rows in results.items():
        for dtype, row in rows.items():
            shown.add_row(
                f"{title},\n{dtype}",
                f"{row.reference_db:.1f}",
                f"{row.compiled_db:.1f}",
                str(row.int8_layers),
                f"{row.exact_ops} of {row.ops}",
                f"{row.latency:.3f}",
                f"{row.latency_low:.3f} to {row.latency_high:.3f}",
            )
    return shown


def _outputs(model: Callable[..., torch.Tensor], bench: BenchModel) -> torch.Tensor:
    return torch.cat([model(*batch).float() for batch in bench.held_out])


if __name__ == "__main__":
    main()
