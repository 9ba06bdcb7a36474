"""Files that were quantized on an x86 machine, for Arm and for x86, run as exact int8 on Arm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from versatil_arm import ArmInductorBackend
from versatil_core import audit, check_exactness, load, lower, read_manifest
from versatil_core.versions import TORCHAO_FOR_TORCH, minor

FOLDER = Path(__file__).parents[3] / "tests" / "portable_files"


def is_older_or_same(path: Path) -> bool:
    order = list(TORCHAO_FOR_TORCH)
    written = minor(read_manifest(path).written_with["torch"])
    return order.index(written) <= order.index(minor(torch.__version__))


FILES = [path for path in sorted(FOLDER.glob("*.pt2")) if is_older_or_same(path)]


def batches() -> list[dict[str, torch.Tensor]]:
    batches: list[dict[str, Any]] = json.loads((FOLDER / "inputs.json").read_text("utf-8"))
    return [{name: torch.tensor(value) for name, value in batch.items()} for batch in batches]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_layer_of_it_is_int8(path: Path) -> None:
    result = audit(load(path), ArmInductorBackend())

    assert [layer.op for layer in result.float_layers] == ["embedding"]


@pytest.mark.arm
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_exact_int8_here(path: Path) -> None:
    reference = load(path)

    lowered = lower(reference, ArmInductorBackend())

    for batch in batches():
        check_exactness(reference, lowered, batch).raise_if_inexact()
