"""Compare the ways to keep int8 kernels from saturating on a CPU without VNNI.

    cd tools && python -m bench.saturation --model minilm

Each model is quantized in five ways. The reference of each is compared with float, and so are
oneDNN's kernels, which are limited to AVX2: a CPU with VNNI computes like one without. Nothing
is compiled. stdout is the result, stderr the progress.
"""

import argparse
import gc
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from bench.bench_models import MODELS, BenchModel, digits
from bench.machine import cpu_text
from versatil_core import SaturationWarning, audit, check_exactness, lower, quantize, sqnr_db
from versatil_core.progress import StageProgress
from versatil_passes import LoweringRules
from versatil_x86 import CPUFeatures, X86InductorBackend
from versatil_x86.int8_weight import QuantizedWeight
from versatil_x86.pair_safe_observer import PairSafePerChannelObserver
from versatil_x86.pair_safe_weights import plain_scale, round_within_pairs
from versatil_x86.quantizer import X86Quantizer
from versatil_x86.rules import x86_lowering_rules

BENCH_MODELS: dict[str, Callable[[], BenchModel]] = {"digits": digits, **MODELS}
# oneDNN reads it before its first kernel. AVX2 leaves out AVX-VNNI, too.
MAX_ISA = ("ONEDNN_MAX_CPU_ISA", "AVX2")
Model = Callable[..., torch.Tensor]


class WithoutVNNI(X86InductorBackend):
    """The backend as on a CPU without VNNI, wherever it runs."""

    @property
    def lowering_rules(self) -> LoweringRules:
        """The rules of such a CPU."""
        return x86_lowering_rules(CPUFeatures(avx2=True))

    def create_quantizer(self, module_path: str = "") -> X86Quantizer:
        """The backend's own quantizer, with the weights of :meth:`weights`."""
        quantizer = X86Quantizer(module_path, saturation=self.saturation)
        assert quantizer.config.weight is not None
        quantizer.config = replace(quantizer.config, weight=self.weights(quantizer.config.weight))
        return quantizer

    def weights(self, spec: QuantizationSpec) -> QuantizationSpec:
        """How weights are quantized: as ``spec`` says."""
        return spec


class SevenBitWeights(WithoutVNNI):
    """torchao's recipe with weights from -63 to 63: two of them add up to 126 at most."""

    def weights(self, spec: QuantizationSpec) -> QuantizationSpec:
        """The same with a smaller range."""
        return replace(spec, quant_min=-63, quant_max=63)


class PlainPairSafe(WithoutVNNI):
    """Pair-safe weights without the search: the scale is the smallest that clips nothing."""

    def weights(self, spec: QuantizationSpec) -> QuantizationSpec:
        """The same with an observer that doesn't search."""
        return replace(spec, observer_or_fake_quant_ctr=PlainScaleObserver.with_args())


class PlainScaleObserver(PairSafePerChannelObserver):
    """Looks at the weight alone."""

    def observe_layer(self, *_: Any) -> None:
        """Ignore what the layer computes."""

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """Quantize at the plain scale; shapes as for the base class."""
        scale = plain_scale(weight, self.activation_max)
        return round_within_pairs(weight, scale, self.activation_max)


VARIANTS: dict[str, Callable[[], WithoutVNNI]] = {
    "full range": WithoutVNNI,
    "reduce_range": lambda: WithoutVNNI(reduce_range=True),
    "7-bit weights": SevenBitWeights,
    "pair-safe, plain": PlainPairSafe,
    "pair-safe, searched": lambda: WithoutVNNI(saturation="safe"),
}


@dataclass(frozen=True)
class Row:
    """One model, quantized in one way.

    Attributes:
        reference_db: SQNR of the reference against float, over all held-out outputs together.
        kernels_db: The same for the kernels.
        kernels_to_reference_db: SQNR of the kernels against their reference; None if equal.
        exact_ops: Ops that are exact when fed the reference's own inputs (first held-out batch).
        ops: Ops that were compared so.
        may_saturate: Layers with a pair of weights for which some input saturates.
        layers: Linears and convolutions in int8.
    """

    reference_db: float
    kernels_db: float
    kernels_to_reference_db: float | None
    exact_ops: int
    ops: int
    may_saturate: int
    layers: int


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(BENCH_MODELS), action="append", help="default: all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ[MAX_ISA[0]] = MAX_ISA[1]
    results = []
    with StageProgress(Console(stderr=True)) as progress:
        for name in arguments.model or BENCH_MODELS:
            results.append(compare(name, progress))
            if not arguments.json:
                Console(highlight=False).print(table(results[-1]))
    if arguments.json:
        print(json.dumps(results, indent=2, allow_nan=False))
    else:
        print(f"{cpu_text()}, {'='.join(MAX_ISA)}, torch {torch.__version__}")


def compare(name: str, progress: StageProgress) -> dict[str, Any]:
    """Quantize one model in every way; returns JSON values."""
    with progress.stage(f"{name}: load, and run in float"):
        bench = BENCH_MODELS[name]()
        truth = _outputs(bench.model, bench)
    rows = {}
    for variant, make_backend in VARIANTS.items():
        with progress.stage(f"{name}: {variant}", total=4) as advance:
            rows[variant] = asdict(_measure(bench, make_backend(), truth, advance))
        gc.collect()  # graphs are cycles; two BERTs need not be in memory at once
    return {"model": name, "outputs": len(truth), "variants": rows}


def table(result: dict[str, Any]) -> Table:
    """Show one model, in 80 columns."""
    title = f"{result['model']}, SQNR over {result['outputs']} held-out inputs, dB"
    shown = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    shown.add_column("weights and activations")
    headings = ("reference\nto float", "kernels\nto float", "kernels\nto ref.", "ops\nexact")
    for heading in (*headings, "layers that\nmay saturate"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for variant, row in result["variants"].items():
        to_reference = row["kernels_to_reference_db"]
        shown.add_row(
            variant,
            f"{row['reference_db']:.2f}",
            f"{row['kernels_db']:.2f}",
            "equal" if to_reference is None else f"{to_reference:.1f}",
            f"{row['exact_ops']} of {row['ops']}",
            f"{row['may_saturate']} of {row['layers']}",
        )
    return shown


def _measure(
    bench: BenchModel, backend: WithoutVNNI, truth: torch.Tensor, advance: Callable[[], None]
) -> Row:
    reference = quantize(bench.model, bench.example, backend, bench.calibration)
    advance()
    of_reference = _outputs(reference, bench)
    advance()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)  # it is what the table is about
        lowered = lower(reference, backend)
    of_kernels = _outputs(lowered, bench)
    advance()
    exactness = check_exactness(reference, lowered, bench.example)
    advance()
    layers = audit(reference, backend)
    between = sqnr_db(of_kernels, of_reference)
    return Row(
        reference_db=sqnr_db(of_reference, truth),
        kernels_db=sqnr_db(of_kernels, truth),
        kernels_to_reference_db=None if between == float("inf") else between,
        exact_ops=len(exactness.ops) - len(exactness.disagreements),
        ops=len(exactness.ops),
        may_saturate=len(layers.saturating_layers),
        layers=layers.int8_count,
    )


def _outputs(model: Model, bench: BenchModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(*batch) for batch in bench.held_out])


if __name__ == "__main__":
    main()
