"""``versatil demo``, as a user runs it: real models on real data."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest

FLOAT_IN_MINILM = {"scaled_dot_product_attention"}


@pytest.mark.parametrize(("model", "int8_layers"), [("digits", 8), ("minilm", 39)])
def test_demo(tmp_path: Path, model: str, int8_layers: int) -> None:
    command = Path(sysconfig.get_path("scripts")) / "versatil"

    output = subprocess.run(
        [command, "demo", "--model", model, "--json"],
        cwd=tmp_path,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout

    result = json.loads(output)
    declined = {layer["op"] for layer in result["declined"]}
    assert result["int8_layers"] == int8_layers
    assert declined == (FLOAT_IN_MINILM if model == "minilm" else set())
    assert result["exact_ops"] == result["ops"] >= int8_layers
    assert result["int8_accuracy"] > result["float_accuracy"] - 0.05
    assert result["int8_bytes"] < result["float_bytes"]
    assert list(tmp_path.iterdir()) == []
