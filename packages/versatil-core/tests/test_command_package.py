"""``versatil package``: what it is given, what it says. The work itself is package()'s."""

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from typer.testing import CliRunner, Result

from versatil_core import (
    BasePT2EBackend,
    Manifest,
    PackagingError,
    command_package,
    quantize,
    save,
)
from versatil_core.command import app
from versatil_core.export import ModelInputs
from versatil_core.manifest import PackageInfo, manifest_values, parse_manifest
from versatil_core.reference_info import TargetInfo, reference_info


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.linear(x) * scale


@pytest.fixture
def file(tmp_path: Path, linear_backend: type[BasePT2EBackend]) -> Path:
    example = {"x": torch.ones(3, 4), "scale": 2.0}
    shapes = {"x": {0: Dim("batch", max=9)}, "scale": None}
    reference = quantize(Model(), example, linear_backend(), [example], dynamic_shapes=shapes)
    save(reference, tmp_path / "model.pt2")
    return tmp_path / "model.pt2"


@pytest.fixture
def calls(
    monkeypatch: pytest.MonkeyPatch, linear_backend: Callable[..., BasePT2EBackend]
) -> list[tuple[ModelInputs, BasePT2EBackend]]:
    """Return what package() was asked for; it writes 2 kB."""
    asked: list[tuple[ModelInputs, BasePT2EBackend]] = []

    def package(
        reference: Any, example: ModelInputs, backend: BasePT2EBackend, path: Path
    ) -> Manifest:
        asked.append((example, backend))
        path.write_bytes(bytes(2000))
        features = ("aes", "avx2", "fma")
        audit = {"int8_count": 1, "layer_count": 2}
        info = PackageInfo(TargetInfo("", "x", {}), "x86_64", "c", features, {}, audit, 1)
        values = manifest_values(reference_info(reference), info)
        return parse_manifest(path, {**values, "members": {}})

    monkeypatch.setattr(command_package, "package", package)
    monkeypatch.setattr(command_package, "backend_of", lambda _: linear_backend())
    monkeypatch.setattr(
        command_package, "host_backend", lambda name: linear_backend(quant_max=name or 99)
    )
    return asked


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, ("package", *arguments))])


def test_it_says_what_was_verified(file: Path, tmp_path: Path, calls: list[Any]) -> None:
    result = run(file, "-o", tmp_path / "out.pt2")

    assert result.exit_code == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    assert first == "Verified: 1 int8 kernels for 1 of 2 layers, results like the reference's"
    version = metadata.version("torch")  # torch.__version__ of some builds is another
    assert second.startswith(f"Runs with: torch {version}, x86_64, avx2 and 2 other")
    assert third == f"Written to {tmp_path / 'out.pt2'} (2 kB)"
    assert "compile and verify: " in result.stderr
    [(example, backend)] = calls
    assert example.args == ()
    assert example.kwargs["x"].shape == (3, 4)
    assert example.kwargs["scale"] == 2.0
    assert backend.quant_max == 127


@pytest.mark.parametrize(("name", "quant_max"), [("auto", 99), ("another", "another")])
def test_another_backend(
    file: Path, tmp_path: Path, calls: list[Any], name: str, quant_max: object
) -> None:
    result = run(file, "-o", tmp_path / "out.pt2", "--backend", name)

    assert result.exit_code == 0, result.stderr
    assert calls[0][1].quant_max == quant_max


@pytest.mark.usefixtures("calls")
def test_json_is_all_of_stdout(file: Path, tmp_path: Path) -> None:
    shown = json.loads(run(file, "-o", tmp_path / "out.pt2", "--json").stdout)

    assert shown["output"] == str(tmp_path / "out.pt2")
    assert shown["bytes"] == 2000
    assert shown["package"]["int8_kernel_calls"] == 1
    assert shown["kind"] == "package"


@pytest.mark.usefixtures("calls")
def test_a_failure_is_one_line(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PackagingError("there is no C++ compiler")

    monkeypatch.setattr(command_package, "package", fail)

    result = run(file, "-o", tmp_path / "out.pt2")

    assert result.exit_code == 1
    assert result.stderr.endswith("error: there is no C++ compiler\n")
    assert not (tmp_path / "out.pt2").exists()
