"""Measure what equalization does for MiniLM: its accuracy, and what its multiplies cost.

    cd tools && python -m bench.equalization

The model has its real weights. It is calibrated with 64 real sentences and judged by others.
Each backend quantizes it as it is, with one exponent for all layers, as in the SmoothQuant
paper, and with the exponents that `quantize(equalize=True)` searches for. The compiled models
take turns. stdout is the result, stderr the progress.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch.fx import GraphModule

from bench.bench_models import BenchModel
from bench.machine import cpu_text
from versatil_core import audit, check_exactness, lower, quantize, sqnr_db
from versatil_core import compile as compile_int8
from versatil_core.calibration import calibrate
from versatil_core.convert import convert
from versatil_core.demo_minilm import minilm_subject
from versatil_core.equalization import Decision, apply_in_place
from versatil_core.equalization_groups import linear_groups, weight_of
from versatil_core.equalization_search import InputRecorder, factors_of
from versatil_core.export import export, model_inputs
from versatil_core.latency import Timing, measure_interleaved, timed
from versatil_core.prepare import prepare
from versatil_core.progress import StageProgress
from versatil_core.reference_info import EqualizedLayers
from versatil_x86 import X86InductorBackend

OFF, SEARCHED = "off", "searched"
FIXED = (0.3, 0.5, 0.7)


@dataclass(frozen=True)
class Row:
    """One backend with one way to equalize.

    Attributes:
        reference_db: SQNR of the reference against float, over all held-out outputs together.
        int8_layers: Layers that run as int8.
        layers: Layers.
        multiplies: Multiplies that were put into the graph.
        exact_ops: Ops that are exact when fed the reference's own inputs.
        ops: Ops that were compared so.
        latency: Median over the rounds of its time over that of ``off``.
        latency_low: Lower quartile of the same.
        latency_high: Upper quartile of the same.
    """

    reference_db: float
    int8_layers: int
    layers: int
    multiplies: int
    exact_ops: int
    ops: int
    latency: float
    latency_low: float
    latency_high: float


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {}
    with StageProgress(Console(stderr=True)) as progress, torch.no_grad():
        with progress.stage("load, and run in float"):
            subject = minilm_subject(progress)
            example, *_ = subject.held_out
            bench = BenchModel(subject.model, example, subject.calibration, subject.held_out)
        for name, is_dynamic in (("static", False), ("dynamic", True)):
            backend = X86InductorBackend.for_host(is_dynamic=is_dynamic)
            results[name] = measure(bench, backend, arguments.rounds, progress)
            if not arguments.json:
                Console(highlight=False).print(table(name, results[name]))
    if arguments.json:
        rows = {
            name: {way: asdict(row) for way, row in ways.items()} for name, ways in results.items()
        }
        print(json.dumps(rows, indent=2, allow_nan=False))
    else:
        print(f"{cpu_text()}, {torch.get_num_threads()} threads, torch {torch.__version__}")


def measure(
    bench: BenchModel, backend: X86InductorBackend, rounds: int, progress: StageProgress
) -> dict[str, Row]:
    """Quantize in each way, and let the compiled models take turns."""
    truth = _outputs(bench.model, bench)
    references, calls = {}, {}
    for way in (OFF, *(f"alpha {alpha}" for alpha in FIXED), SEARCHED):
        with progress.stage(f"dynamic={backend.is_dynamic}: {way}"):
            references[way] = quantized(bench, backend, way)
            compiled = compile_int8(references[way], backend)
            calls[way] = timed(partial(compiled, *bench.example))
    with progress.stage("measure", total=rounds) as advance:
        times = measure_interleaved(calls, rounds=rounds, on_round=advance)
    return {
        way: _row(bench, backend, reference, truth, times.ratio_timing(way, OFF))
        for way, reference in references.items()
    }


def quantized(bench: BenchModel, backend: X86InductorBackend, way: str) -> GraphModule:
    """Quantize in one way."""
    if way.startswith("alpha"):
        return with_one_alpha(bench, backend, float(way.removeprefix("alpha")))
    is_searched = way == SEARCHED
    return quantize(bench.model, bench.example, backend, bench.calibration, equalize=is_searched)


def with_one_alpha(bench: BenchModel, backend: X86InductorBackend, alpha: float) -> GraphModule:
    """Equalize every linear layer with one exponent, by multiplies, and quantize."""
    exported = export(bench.model, bench.example)
    groups = linear_groups(exported)
    recorder = InputRecorder(exported, groups)
    for batch in bench.calibration:
        recorder.record(model_inputs(batch))
    summary = EqualizedLayers((), alpha, "multiply", "", 0.0, "")
    decisions = []
    for group in groups:
        weights = [weight_of(layer) for layer in group.layers]
        factors = factors_of(recorder.rows[group.source], weights, alpha)
        decisions.append(Decision(group, factors, None, summary))
    apply_in_place(exported, decisions)
    prepared = prepare(exported, backend)
    calibrate(prepared, bench.calibration, bench.example)
    return convert(prepared)


def table(name: str, rows: dict[str, Row]) -> Table:
    """Show one backend, in 80 columns."""
    shown = Table(
        title=f"MiniLM, {name} int8", title_justify="left", show_edge=False, pad_edge=False
    )
    shown.add_column("", no_wrap=True)
    for heading in (
        "SQNR to\nfloat, dB",
        "in\nint8",
        "multi-\nplies",
        "ops\nexact",
        "latency\nto off",
        "middle\nhalf",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for way, row in rows.items():
        shown.add_row(
            way,
            f"{row.reference_db:.1f}",
            str(row.int8_layers),
            str(row.multiplies),
            f"{row.exact_ops} of {row.ops}",
            f"{row.latency:.3f}",
            f"{row.latency_low:.3f} to {row.latency_high:.3f}",
        )
    return shown


def _row(
    bench: BenchModel,
    backend: X86InductorBackend,
    reference: GraphModule,
    truth: torch.Tensor,
    timing: Timing,
) -> Row:
    exactness = check_exactness(reference, lower(reference, backend), bench.example)
    layers = audit(reference, backend)
    named = [str(node.target) for node in reference.graph.find_nodes(op="get_attr")]
    return Row(
        reference_db=sqnr_db(_outputs(reference, bench), truth),
        int8_layers=layers.int8_count,
        layers=len(layers.layers),
        multiplies=sum(name.endswith("_input_factors") for name in named),
        exact_ops=len(exactness.ops) - len(exactness.disagreements),
        ops=len(exactness.ops),
        latency=timing.median,
        latency_low=timing.low,
        latency_high=timing.high,
    )


def _outputs(model: Callable[..., torch.Tensor], bench: BenchModel) -> torch.Tensor:
    return torch.cat([model(*batch) for batch in bench.held_out])


if __name__ == "__main__":
    main()
