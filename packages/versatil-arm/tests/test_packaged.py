"""AOTInductor inside ``environment_context()`` makes a package of int8 kernels."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor import aoti_compile_and_package, aoti_load_package

from versatil_arm import ArmInductorBackend
from versatil_core import quantize, sqnr_db

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Primitives

pytestmark = pytest.mark.arm


class Pointwise(torch.nn.Module):
    """Layers whose sizes need not be known."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 8, 1, stride=2), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


class Square(Pointwise):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)


def packaged(
    model: torch.nn.Module, x: torch.Tensor, path: Path
) -> tuple["Callable[[torch.Tensor], torch.Tensor]", torch.nn.Module]:
    backend = ArmInductorBackend(activation_dtype="uint8")
    reference = quantize(model.eval(), x, backend, [x])
    with torch.no_grad(), backend.environment_context():
        exported = torch.export.export(reference, (x,))
        package = aoti_compile_and_package(exported, package_path=str(path / "model.pt2"))
    return aoti_load_package(package), reference


def test_a_package_is_int8(tmp_path: Path, primitives: "Primitives") -> None:
    torch.manual_seed(0)
    x, before = torch.randn(2, 3, 8, 8), _settings()

    run, reference = packaged(Pointwise(), x, tmp_path)

    assert _settings() == before
    result, ran = primitives(lambda: run(x))
    assert ran == ["matmul,lowp_gemm:acl"] * 2
    assert sqnr_db(result, reference(x)) > 60


@pytest.mark.xfail(
    torch.__version__ < "2.11",
    reason="torch 2.9 and 2.10 drop the sizes of a graph that is packaged before our passes see it, "
    "so that a convolution with a kernel larger than 1 stays float",
)
def test_a_packaged_convolution_is_int8(tmp_path: Path, primitives: "Primitives") -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)

    run, reference = packaged(Square(), x, tmp_path)

    result, ran = primitives(lambda: run(x))
    assert sqnr_db(result, reference(x)) > 60
    assert ran == ["matmul,lowp_gemm:acl"] * 2


def _settings() -> dict[str, object]:
    """Inductor's config without the notes on the last package, which torch itself leaves there."""
    settings: dict[str, object] = inductor_config.get_config_copy()
    return {name: value for name, value in settings.items() if name != "aot_inductor.metadata"}
