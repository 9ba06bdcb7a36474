"""Files that every torch wrote are read by the torch here, and compute what they did."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from versatil_core import UnsupportedVersionError, load, read_manifest, sqnr_db
from versatil_core.versions import TORCHAO_FOR_TORCH, minor

FOLDER = Path(__file__).parents[3] / "tests" / "portable_files"
FILES = sorted(FOLDER.glob("*.pt2"))


def is_newer(path: Path) -> bool:
    order = list(TORCHAO_FOR_TORCH)
    written = minor(read_manifest(path).written_with["torch"])
    return order.index(written) > order.index(minor(torch.__version__))


def batches() -> list[dict[str, torch.Tensor]]:
    batches: list[dict[str, Any]] = json.loads((FOLDER / "inputs.json").read_text("utf-8"))
    return [{name: torch.tensor(value) for name, value in batch.items()} for batch in batches]


def test_every_torch_wrote_files() -> None:
    written = {minor(read_manifest(path).written_with["torch"]) for path in FILES}

    assert written == set(TORCHAO_FOR_TORCH)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_another_torch(path: Path) -> None:
    if is_newer(path):
        with pytest.raises(UnsupportedVersionError, match="newer ones"):
            load(path)
        return

    reference = load(path)

    wanted = json.loads(path.with_suffix(".json").read_text("utf-8"))
    for batch, scores in zip(batches(), wanted, strict=True):
        # Float layers in between may round otherwise.
        assert sqnr_db(reference(**batch)["scores"], torch.tensor(scores)) > 60
    assert {"stem.0.weight", "stem.0.bias", "head.2.weight_scale"} <= reference.state_dict().keys()
