"""A package for Arm holds the int8 kernels that the audit names, and runs them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.export import Dim

from versatil_arm import ArmInductorBackend
from versatil_core import load_package, lower, package, quantize, sqnr_db

if TYPE_CHECKING:
    from conftest import Primitives

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


@pytest.fixture
def packaged_anywhere(any_host: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Package for Arm on this machine, as ``any_host`` lowers for it."""
    for module in ("package", "packaged_model"):
        monkeypatch.setattr(sys.modules[f"versatil_core.{module}"], "check_host", lambda _: None)


@pytest.mark.portable
@pytest.mark.usefixtures("packaged_anywhere")
def test_every_layer_is_packaged(
    model: torch.nn.Module, batch: torch.Tensor, tmp_path: Path
) -> None:
    backend = ArmInductorBackend()
    shapes = ({0: Dim("images", max=8)},)
    reference = quantize(model, batch, backend, [batch], dynamic_shapes=shapes)

    manifest = package(reference, batch, backend, tmp_path / "model.pt2")

    assert manifest.package is not None
    assert manifest.package.int8_kernel_calls == 6
    packaged, lowered = load_package(tmp_path / "model.pt2"), lower(reference, backend)
    for images in (batch, batch[:1], batch.repeat(4, 1, 1, 1)):
        assert sqnr_db(packaged(images), lowered(images)) > 60


class Square(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


@pytest.mark.arm
def test_a_package_runs_the_fast_kernel(tmp_path: Path, primitives: "Primitives") -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    backend = ArmInductorBackend()
    reference = quantize(Square().eval(), x, backend, [x])

    package(reference, x, backend, tmp_path / "model.pt2")

    packaged = load_package(tmp_path / "model.pt2")
    result, ran = primitives(lambda: packaged(x))
    assert ran == ["matmul,lowp_gemm:acl"] * 2
    assert sqnr_db(result, reference(x)) > 60
