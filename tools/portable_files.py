"""Write the portable files that tests load with every later torch.

Usage, with one torch at a time; needs versatil-x86 and versatil-arm::

    python tools/portable_files.py tests/portable_files

On Arm, or under its emulation, with ``--machine=-aarch64``. Each file is of a small model with convolutions, a residual add, an embedding and linears, with a
dynamic batch. ``*.json`` beside it is what it computed, when it was written, for the two batches in
``inputs.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from versatil_arm import ArmInductorBackend
from versatil_core import quantize, save
from versatil_core.versions import minor
from versatil_x86 import X86InductorBackend

if TYPE_CHECKING:
    from versatil_core import BasePT2EBackend


class Model(nn.Module):
    """A bit of everything that is int8."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(7, 16)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.block = nn.Conv2d(16, 16, 1)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, ids: torch.Tensor, *, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Classify.

        Args:
            ids: int64, (batch, 2).
            image: float32, (batch, 3, 9, 9).
        """
        x = self.stem(image)
        x = torch.relu(self.block(x) + x).mean((2, 3))
        return {"scores": self.head(x + self.embedding(ids).mean(1))}


BATCHES = (1, 3)


def inputs(batch: int) -> dict[str, torch.Tensor]:
    """Return inputs that are the same everywhere; random numbers need not be."""
    image = torch.arange(batch * 3 * 9 * 9, dtype=torch.float64).mul(0.37).sin()
    return {
        "ids": (torch.arange(batch * 2) % 7).reshape(batch, 2),
        "image": image.float().reshape(batch, 3, 9, 9),
    }


def backends() -> dict[str, BasePT2EBackend]:
    """Return what to quantize for; each is exact on every CPU of its kind."""
    return {
        "x86": X86InductorBackend(saturation="safe"),
        "x86-dynamic": X86InductorBackend(is_dynamic=True, saturation="safe"),
        "arm": ArmInductorBackend(),
    }


def write(folder: Path, machine: str) -> list[Path]:
    """Write one file for each backend, with the torch that is installed."""
    torch.manual_seed(0)
    model, written = Model().eval(), []
    shapes = {name: {0: torch.export.Dim("batch", max=64)} for name in inputs(1)}
    for name, backend in backends().items():
        calibration = None if backend.is_dynamic else [inputs(4), inputs(3)]
        reference = quantize(model, inputs(2), backend, calibration, dynamic_shapes=shapes)
        path = folder / f"{name}-torch-{minor(torch.__version__)}{machine}.pt2"
        save(reference, path)
        scores = [reference(**inputs(batch))["scores"].tolist() for batch in BATCHES]
        path.with_suffix(".json").write_text(json.dumps(scores) + "\n", encoding="utf-8")
        written.append(path)
    return written


def main() -> None:
    """Write the files and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", default="", help="goes behind the name, such as -aarch64")
    arguments = parser.parse_args()
    given = [{name: value.tolist() for name, value in inputs(n).items()} for n in BATCHES]
    (arguments.folder / "inputs.json").write_text(json.dumps(given) + "\n", encoding="utf-8")
    for path in write(arguments.folder, arguments.machine):
        print(f"{path}: {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    main()
