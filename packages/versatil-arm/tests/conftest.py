"""Models, and what the machine is."""

import os
import platform
import sys
from collections.abc import Callable
from typing import Protocol

import pytest
import torch

from versatil_arm.rules import MACHINE_TYPES

IS_ARM = platform.machine().lower() in MACHINE_TYPES
# tools/arm_emulation/armrun sets it.
IS_EMULATED = IS_ARM and "QEMU_LD_PREFIX" in os.environ


def pytest_configure(config: pytest.Config) -> None:
    """Know the markers."""
    config.addinivalue_line("markers", "arm: runs an Arm kernel, so it needs an Arm CPU")
    config.addinivalue_line("markers", "portable: the same everywhere, and slow under emulation")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what this machine has no kernels for, or no time for."""
    no_kernels = "runs an Arm kernel: `tox -e arm-emulated-torch210` on x86, `tox -e arm` on Arm"
    no_time = "the same on every machine: the tests on x86 run it, emulation would take long"
    for item in items:
        if not IS_ARM and item.get_closest_marker("arm"):
            item.add_marker(pytest.mark.skip(reason=no_kernels))
        if IS_EMULATED and item.get_closest_marker("portable"):
            item.add_marker(pytest.mark.skip(reason=no_time))


@pytest.fixture
def any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower and compile for Arm on this machine, whatever it is.

    x86 runs the same graph on its own int8 x int8 kernel, which is exact as long as no pair of products saturates.
    """
    for module in ("lower", "compile"):
        monkeypatch.setattr(sys.modules[f"versatil_core.{module}"], "check_host", lambda _: None)


class EveryLayer(torch.nn.Module):
    """A 3x3 convolution with stride and padding, a dilated, a 1x1, a 1-D one, and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.dilated = torch.nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.pointwise = torch.nn.Conv2d(8, 12, 1, stride=2)
        self.row = torch.nn.Conv1d(12, 12, 3, padding=1, bias=False)
        self.hidden = torch.nn.Linear(12, 20)
        self.head = torch.nn.Linear(20, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.strided(x).relu()
        x = (self.dilated(x) + x).relu()
        x = self.pointwise(x)
        x = torch.nn.functional.gelu(self.row(x.flatten(2)))
        return self.head(self.hidden(x.mean(2)).relu())


@pytest.fixture(scope="session")
def model() -> torch.nn.Module:
    """All kinds of layers that become a product of matrices."""
    torch.manual_seed(0)
    return EveryLayer().eval()


@pytest.fixture(scope="session")
def batch() -> torch.Tensor:
    """An input of that model."""
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Primitives(Protocol):
    """Runs a function, and says which oneDNN primitives ran meanwhile."""

    def __call__(self, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[str]]:
        """Return the result, and for instance ``["matmul,lowp_gemm:acl"]``; reorders are left out."""


@pytest.fixture
def primitives(capfd: pytest.CaptureFixture[str]) -> Primitives:
    """Let oneDNN print each primitive that it runs, and read it."""

    def run(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[str]]:
        capfd.readouterr()
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            result = function()
        lines = [line for line in capfd.readouterr().out.splitlines() if ",exec,cpu," in line]
        ran = [line.split(",exec,cpu,")[1].split(",")[:2] for line in lines]
        return result, [",".join(names) for names in ran if names[0] != "reorder"]

    return run
