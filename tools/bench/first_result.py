"""Compare how soon a new process has its first result: with a package, and by compiling.

    cd tools && python -m bench.first_result --model digits --threads 2

Each turn is a new process, timed from its start until the result is there; imports and reading
files are part of it. The turns are interleaved. "Cold" starts with an empty cache of Inductor,
"warm" with that of an earlier process. A package never sees a cache, and must leave none.
stdout is the result, stderr the progress.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.bench_models import MODELS as LARGE_MODELS
from bench.bench_models import BenchModel, FirstOutput, digits, transformers
from bench.machine import cpu_text
from versatil_core import host_backend, package, quantize, save
from versatil_core.latency import LatencyComparison, measure_interleaved
from versatil_core.progress import StageProgress

PACKAGE, WARM, COLD = "load_package", "load, compile: warm", "load, compile: cold"
# What runs in the new process, in a folder with the files.
START = "import torch, versatil_core; inputs = torch.load('inputs.pt')\n"
COMPILE = "versatil_core.compile(versatil_core.load('portable.pt2'), versatil_core.host_backend())"
PROGRAMS = {
    "imports only": "",
    PACKAGE: "versatil_core.load_package('package.pt2')(*inputs)",
    WARM: f"{COMPILE}(*inputs)",
    COLD: f"{COMPILE}(*inputs)",
}


def small_bert() -> BenchModel:
    """BERT with two layers of 128 and random weights, one text of 64 tokens."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    model = FirstOutput(transformers.BertModel(config, add_pooling_layer=False)).eval()
    batches = tuple((torch.randint(config.vocab_size, (1, 64)),) for _ in range(4))
    return BenchModel(model, batches[0], batches, batches)


SMALL_MODELS: dict[str, Callable[[], BenchModel]] = {"digits": digits, "small-bert": small_bert}
MODELS = SMALL_MODELS | LARGE_MODELS


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    small = " and ".join(SMALL_MODELS)
    parser.add_argument("--model", choices=list(MODELS), action="append", help=f"default: {small}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    with StageProgress(Console(stderr=True)) as progress:
        for model in arguments.model or SMALL_MODELS:
            seconds = measure(model, arguments.threads, arguments.rounds, progress)
            results.append(to_dict(model, seconds))
            if not arguments.json:
                Console(highlight=False).print(table(results[-1]))
    if arguments.json:
        print(json.dumps(results, indent=2, allow_nan=False))
        return
    print(f"{cpu_text()}, threads: {arguments.threads}")
    print(f"torch {torch.__version__}, {arguments.rounds} rounds")


def measure(model: str, threads: int, rounds: int, progress: StageProgress) -> LatencyComparison:
    """Write the files of one model, then let the programs take turns."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with progress.stage(f"{model}: quantize, save and package"):
            write_files(MODELS[model](), folder)
        turns = {name: _turn(name, folder, threads) for name in PROGRAMS}
        with progress.stage(f"{model}: fill the cache, and the system's of files"):
            for name in (PACKAGE, WARM):
                turns[name]()
        with progress.stage(f"{model}: measure", total=rounds) as advance:
            return measure_interleaved(turns, rounds=rounds, on_round=advance)


def write_files(bench: BenchModel, folder: Path) -> None:
    """Quantize a model, and write what the programs read."""
    backend = host_backend()
    reference = quantize(bench.model, bench.example, backend, bench.calibration)
    save(reference, folder / "portable.pt2")
    package(reference, bench.example, backend, folder / "package.pt2")
    torch.save(bench.example, folder / "inputs.pt")


def _turn(name: str, folder: Path, threads: int) -> Callable[[], float]:
    def turn() -> float:
        if name == WARM:
            return seconds_to_result(name, folder, folder / "cache", threads)
        with tempfile.TemporaryDirectory() as cache:
            seconds = seconds_to_result(name, folder, Path(cache), threads)
            if name == PACKAGE and (left := list(Path(cache).iterdir())):
                raise SystemExit(f"loading a package compiled something: {left[0].name}")
            return seconds

    return turn


def seconds_to_result(name: str, folder: Path, cache: Path, threads: int) -> float:
    """Run a program in a new process; return the seconds until it has its result."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": str(threads)}
    program = f"{START}{PROGRAMS[name]}\nprint('done', flush=True)"
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        is_done = process.stdout.readline() == "done\n"
        seconds = time.perf_counter() - start
    if not is_done or process.returncode != 0:
        raise SystemExit(f"{name!r} failed; its own message is above")
    return seconds


def to_dict(model: str, seconds: LatencyComparison) -> dict[str, Any]:
    """Return JSON values: the seconds of each way, and how many times those of a package they are."""
    return {
        "model": model,
        "ways": {
            name: {
                "seconds": summary.median,
                "seconds_middle_half": summary.quartiles,
                "over_package": seconds.ratio(name, PACKAGE),
                "over_package_middle_half": seconds.ratio_quartiles(name, PACKAGE),
            }
            for name, summary in seconds.by_name.items()
        },
    }


def table(result: dict[str, Any]) -> Table:
    """Show one model, in 80 columns."""
    shown = Table(title=result["model"], title_justify="left", show_edge=False, pad_edge=False)
    shown.add_column("first result by")
    for heading in ("median", "middle half", "of package", "middle half"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, values in result["ways"].items():
        low, high = values["seconds_middle_half"]
        least, most = values["over_package_middle_half"]
        shown.add_row(
            name,
            f"{values['seconds']:.2f} s",
            f"{low:.2f} to {high:.2f}",
            f"{values['over_package']:.2f}",
            f"{least:.2f} to {most:.2f}",
        )
    return shown


if __name__ == "__main__":
    main()
