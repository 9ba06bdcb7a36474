"""AOTInductor inside ``environment_context()`` makes int8 kernels that write to nobody's tensor."""

import zipfile
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor import aoti_compile_and_package, aoti_load_package

from versatil_core import quantize, sqnr_db
from versatil_x86 import X86InductorBackend


class Residual(torch.nn.Module):
    """A linear and a convolution whose results are added to inputs: the form of case 27."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(
        self, h: torch.Tensor, x: torch.Tensor, image: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(h) + x, torch.relu(self.conv(image) + image)


@pytest.mark.parametrize(
    "is_dynamic",
    [False, pytest.param(True, marks=pytest.mark.dynamic_convolution)],
    ids=["static", "dynamic"],
)
def test_a_package_is_int8_and_leaves_its_inputs(tmp_path: Path, *, is_dynamic: bool) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(2, 4, 8), torch.randn(2, 4, 8), torch.randn(1, 4, 8, 8))
    backend = X86InductorBackend(is_dynamic=is_dynamic, reduce_range=True)
    calibration = None if is_dynamic else [inputs]
    reference = quantize(Residual().eval(), inputs, backend, calibration)
    before = _settings()

    with torch.no_grad(), backend.environment_context():
        exported = torch.export.export(reference, inputs)
        path = aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))

    assert _settings() == before
    with zipfile.ZipFile(path) as archive:
        sources = [archive.read(name) for name in archive.namelist() if name.endswith(".cpp")]
    assert any(b"qlinear_pointwise" in source for source in sources)
    assert any(b"qconv" in source for source in sources)

    packaged = aoti_load_package(path)
    given = [value.clone() for value in inputs]
    for _ in range(2):  # a second call would read what the first had overwritten
        results = packaged(*given)
        assert all(torch.equal(old, new) for old, new in zip(inputs, given, strict=True))
        for result, expected in zip(results, reference(*inputs), strict=True):
            assert sqnr_db(result, expected) > 100


def _settings() -> dict[str, object]:
    """Inductor's config without the notes on the last package, which torch itself leaves there."""
    settings: dict[str, object] = inductor_config.get_config_copy()
    return {name: value for name, value in settings.items() if name != "aot_inductor.metadata"}
