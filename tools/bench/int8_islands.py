"""What it gains to run the ops between int8 layers on int8 (`KeepInt8`): quantizes left, and latency.

    cd tools && python -m bench.int8_islands

Three models with random weights, each compiled with the pass and without it; both take turns. stdout is the result,
stderr the progress.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from bench.machine import cpu_text
from versatil_core import compile as compile_int8
from versatil_core import quantize
from versatil_core.latency import measure_interleaved, median_interval, timed
from versatil_core.lower import lowered_copy
from versatil_core.progress import StageProgress
from versatil_passes import LoweringRules
from versatil_x86 import X86InductorBackend

qd = torch.ops.quantized_decomposed
OFF, ON = "without", "with"


class Without(X86InductorBackend):
    """The same backend with ops between int8 layers on float."""

    @property
    def lowering_rules(self) -> LoweringRules:
        """The rules of x86, but for one pass."""
        return replace(super().lowering_rules, without_passes=frozenset({"KeepInt8"}))


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm and relu."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Two of these."""
    return nn.Sequential(conv(inputs, outputs), conv(outputs, outputs))


class UNet(nn.Module):
    """Two levels, 32 channels at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = double(3, 32), double(32, 64), double(64, 128)
        self.up2, self.up1 = double(192, 64), double(96, 32)
        self.head = nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Any:
        """Take and return images."""
        up = partial(functional.interpolate, scale_factor=2.0)
        a = self.down1(x)
        b = self.down2(functional.max_pool2d(a, 2))
        c = self.bottom(functional.max_pool2d(b, 2))
        b = self.up2(torch.cat([up(c), b], 1))
        return self.head(self.up1(torch.cat([up(b), a], 1)))


class Inception(nn.Module):
    """A stem and three blocks of four branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 128, 5, 2)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                (
                    *(conv(128, 32, 1), nn.Sequential(conv(128, 32, 1), conv(32, 32))),
                    *(nn.Sequential(conv(128, 16, 1), conv(16, 32, 5)), conv(128, 32, 1)),
                )
            )
            for _ in range(3)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Any:
        """Take images, return ``[batch, 10]``."""
        x = functional.max_pool2d(self.stem(x), 3, 2, 1)
        blocks: Any = self.blocks
        for a, b, c, d in blocks:
            x = torch.cat([a(x), b(x), c(x), d(functional.max_pool2d(x, 3, 1, 1))], 1)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class PoolThenRelu(nn.Module):
    """Four convolutions, a pool and a relu behind each."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 64, 128)
        self.layers = nn.ModuleList(
            map(partial(nn.Conv2d, kernel_size=3, padding=1), widths, widths[1:])
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Any:
        """Take images, return ``[batch, 10]``."""
        for layer in self.layers:
            x = functional.max_pool2d(layer(x), 2).relu()
        return self.head(x.amax((2, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "U-Net": (UNet, 128),
    "Inception": (Inception, 128),
    "pool, relu": (PoolThenRelu, 128),
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shown = Table(show_edge=False, pad_edge=False)
    for heading in ("model", OFF, ON, "latency, without / with", "95 % interval"):
        shown.add_column(heading, no_wrap=True)
    with StageProgress(Console(stderr=True)) as progress, torch.no_grad():
        for name in MODELS:
            with progress.stage(name):
                shown.add_row(name, *measure(name, arguments.rounds))
    Console(highlight=False).print(shown)
    print(f"{cpu_text()}, {arguments.threads} threads, torch {torch.__version__}")


def measure(name: str, rounds: int) -> tuple[str, ...]:
    """Count quantizes and dequantizes of one model, and let both ways take turns."""
    make, size = MODELS[name]
    torch.manual_seed(0)
    batch = torch.randn(1, 3, size, size)
    backends = {OFF: Without.for_host(), ON: X86InductorBackend.for_host()}
    reference = quantize(make().eval(), batch, backends[ON], [batch])
    counts, calls = [], {}
    for way, backend in backends.items():
        graph = lowered_copy(reference, backend.lowering_rules)[0].graph
        pair = (qd.quantize_per_tensor.default, qd.dequantize_per_tensor.default)
        nodes = [graph.find_nodes(op="call_function", target=target) for target in pair]
        counts.append(str(sum(map(len, nodes))))
        calls[way] = timed(partial(compile_int8(reference, backend), batch))
    times = measure_interleaved(calls, rounds=rounds)
    low, high = median_interval(times.ratios(OFF, ON))
    return *counts, f"{times.ratio(OFF, ON):.3f}", f"{low:.3f} to {high:.3f}"


if __name__ == "__main__":
    main()
