"""A C++ program runs a package: the same results as in Python, and a clear refusal of what it can't run."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from versatil_core import host_backend, load_package, package, quantize
from versatil_core.model_file import read_model_file, write_model_file

SOURCE = Path(__file__).resolve().parent.parent / "tools" / "cpp_host"
CMAKE = shutil.which("cmake")
MISSING = [name for name in ("cmake", "ninja") if shutil.which(name) is None]
MISSING += [] if find_spec("nlohmann_json") else ["nlohmann-json"]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs pip install {' '.join(MISSING)}"),
    # What torch's own compiler uses; seen by whoever imports it first.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


def run(*command: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Host:
    """The program, and a package for it: images and a scale, of a batch from 1 to 8."""

    program: Path
    package: Path

    def run(self, file: Path, *inputs: str) -> subprocess.CompletedProcess[str]:
        """Run it next to ``file``."""
        return run(self.program, file, "result", *inputs, folder=file.parent)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(
        self, image: torch.Tensor, factor: float, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.conv(image).relu().mean((2, 3))
        # A result that is not contiguous.
        return self.head(h).t() * factor, index + 1


def inputs(batch: int) -> tuple[torch.Tensor, float, torch.Tensor]:
    random = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, 8, 8, generator=random), 2.0, torch.arange(batch)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    folder = tmp_path_factory.mktemp("host")
    headers = find_spec("nlohmann_json")
    assert CMAKE
    assert headers
    assert headers.origin
    settings = {
        "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
        "CMAKE_INCLUDE_PATH": Path(headers.origin).with_name("include"),
        "CMAKE_CXX_FLAGS": "-O1 -Wall -Wextra -Werror",
    }
    defined = [f"-D{name}={value}" for name, value in settings.items()]
    for step in (("-G", "Ninja", "-S", SOURCE, "-B", folder, *defined), ("--build", folder)):
        done = run(CMAKE, *map(str, step))
        assert done.returncode == 0, done.stdout + done.stderr

    torch.manual_seed(0)
    backend, batch = host_backend(), Dim("batch", max=8)
    reference = quantize(
        Network().eval(),
        inputs(4),
        backend,
        [inputs(8)],
        dynamic_shapes=({0: batch}, None, {0: batch}),
    )
    package(reference, inputs(4), backend, folder / "model.pt2")
    return Host(folder / "cpp_host", folder / "model.pt2")


def given(folder: Path, batch: int) -> list[str]:
    """Write the inputs of a call into files; return what to write on the command line."""
    image, _, index = inputs(batch)
    (folder / "image.bin").write_bytes(image.numpy().tobytes())
    (folder / "index.bin").write_bytes(index.numpy().tobytes())
    return [f"{batch}x3x8x8:image.bin", f"{batch}:index.bin"]


def test_results_are_those_of_python(host: Host, tmp_path: Path) -> None:
    file = Path(shutil.copy(host.package, tmp_path))
    for batch in (1, 5):
        done = host.run(file, *given(tmp_path, batch))

        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"result.0.bin: float32 [4, {batch}]",
            f"result.1.bin: int64 [{batch}]",
        ]
        for number, expected in enumerate(load_package(file)(*inputs(batch))):
            written = (tmp_path / f"result.{number}.bin").read_bytes()
            assert written == expected.contiguous().numpy().tobytes()


def test_inputs_that_do_not_fit_are_refused(host: Host, tmp_path: Path) -> None:
    file = Path(shutil.copy(host.package, tmp_path))
    image, index = given(tmp_path, 2)
    refused = {
        (image,): "takes 2 inputs, got 1",
        ("2x3x8x9:image.bin", index): 'input "image": got the sizes [2, 3, 8, 9], expected',
        ("2x3x8:image.bin", index): 'input "image": got the sizes [2, 3, 8], expected',
        ("9x3x8x8:image.bin", index): 'input "image": got the sizes [9, 3, 8, 8], expected',
        # Each batch is possible, but the two differ.
        (image, "3:index.bin"): 'input "index": got the sizes [3], expected',
        (image, "2:image.bin"): "image.bin has 1536 bytes, expected 16: int64 [2]",
        (image, "2:nowhere.bin"): "nowhere.bin",
        (image, "index.bin"): "index.bin is no input: give sizes and a file",
        (image, "2,:index.bin"): "2,:index.bin is no input: give sizes and a file",
    }
    for arguments, message in refused.items():
        done = host.run(file, *arguments)

        assert done.returncode == 1, arguments
        assert message in done.stderr
        assert not (tmp_path / "result.0.bin").exists()


def test_files_that_it_cannot_run_are_refused(host: Host, tmp_path: Path) -> None:
    packaged = read_model_file(host.package)
    machine = {**packaged.manifest["package"], "cpu_features": ["avx2048"]}
    refused: dict[str, dict[str, Any]] = {
        "has the format version 99, and this program reads 2": {"format_version": 99},
        "is a portable file: package it with versatil_core.package()": {"kind": "portable"},
        "was packaged with torch 1.13.1, and": {"written_with": {"torch": "1.13.1"}},
        'with "avx2048", which this CPU lacks': {"package": machine},
    }
    file = tmp_path / "model.pt2"
    for message, changes in refused.items():
        write_model_file(file, {**packaged.manifest, **changes}, packaged.members)
        done = host.run(file, *given(tmp_path, 2))

        assert done.returncode == 1, message
        assert message in done.stderr

    file.write_bytes(host.package.read_bytes()[:-100])
    for damaged in (file, tmp_path / "nowhere.pt2"):
        done = host.run(damaged, *given(tmp_path, 2))

        assert done.returncode == 1
        assert f"{damaged} is missing, damaged, or not from versatil_core.package()" in done.stderr


def test_wrong_usage_is_said(host: Host) -> None:
    done = run(host.program)

    assert done.returncode == 2
    assert done.stderr.startswith("usage: cpp_host model.pt2 result")
