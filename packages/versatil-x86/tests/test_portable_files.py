"""Files from every torch, and those that were quantized on an Arm machine, run as exact int8 here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from versatil_core import (
    audit,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    load,
    lower,
    read_manifest,
    sqnr_db,
)
from versatil_core._torch_compat import run_and_get_code
from versatil_core.int8_calls import int8_calls
from versatil_core.versions import TORCHAO_FOR_TORCH, minor
from versatil_x86 import X86InductorBackend
from versatil_x86._torch_compat import has_dynamic_conv_kernel

FOLDER = Path(__file__).parents[3] / "tests" / "portable_files"


def is_older_or_same(path: Path) -> bool:
    order = list(TORCHAO_FOR_TORCH)
    written = minor(read_manifest(path).written_with["torch"])
    return order.index(written) <= order.index(minor(torch.__version__))


FILES = [path for path in sorted(FOLDER.glob("x86*.pt2")) if is_older_or_same(path)]


def batches() -> list[dict[str, torch.Tensor]]:
    batches: list[dict[str, Any]] = json.loads((FOLDER / "inputs.json").read_text("utf-8"))
    return [{name: torch.tensor(value) for name, value in batch.items()} for batch in batches]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_exact_int8_here(path: Path) -> None:
    reference, backend = load(path), X86InductorBackend.for_host()

    lowered = lower(reference, backend)

    # torch 2.9 has no shape function for dynamic convolutions.
    keeps_convolutions = "dynamic" in path.stem and not has_dynamic_conv_kernel()
    floats = {layer.op for layer in audit(reference, backend).float_layers}
    assert floats == ({"embedding", "conv2d"} if keeps_convolutions else {"embedding"})
    for batch in batches():
        check_exactness(reference, lowered, batch).raise_if_inexact()


def test_the_oldest_file_compiles_to_int8_kernels() -> None:
    """Nothing was imported that torch's own patterns would need, and from torch 2.14 on they are gone."""
    [oldest] = [path for path in FILES if path.stem == "x86-torch-2.9"]
    reference, backend = load(oldest), X86InductorBackend.for_host()

    compiled, batch = compile(reference, backend), batches()[1]
    result, codes = run_and_get_code(lambda: compiled(**batch)["scores"])

    assert sum(map(int8_calls, codes)) == audit(reference, backend).int8_count == 4
    wanted = json.loads(oldest.with_suffix(".json").read_text("utf-8"))[1]
    assert sqnr_db(result, torch.tensor(wanted)) > 40


@pytest.mark.parametrize("path", sorted(FOLDER.glob("arm*.pt2")), ids=lambda path: path.stem)
def test_a_file_for_arm_says_why_it_stays_float(path: Path) -> None:
    if not is_older_or_same(path):
        pytest.skip("a newer torch wrote it")

    result = audit(load(path), X86InductorBackend.for_host())

    reasons = [layer.reason or "" for layer in result.layers if layer.op != "embedding"]
    assert len(reasons) == 4
    assert all("activations are torch.int8" in reason for reason in reasons)
