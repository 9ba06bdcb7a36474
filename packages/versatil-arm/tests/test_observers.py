"""Observers of activations by name, on Arm: for int8 activations as for uint8."""

import pytest
import torch
from torch import Tensor, nn

from versatil_arm import ArmInductorBackend
from versatil_core import audit, quantize, sqnr_db
from versatil_core.observer_choice import OBSERVER_NAMES

pytestmark = pytest.mark.portable


class Net(nn.Module):
    """A convolution, a relu, which leaves zeros, and two linears around a gelu."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3)
        self.up, self.head = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x)).permute(0, 2, 3, 1)
        y: Tensor = self.head(nn.functional.gelu(self.up(x)))
        return y


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("equalize", [False, True])
@pytest.mark.parametrize("name", OBSERVER_NAMES)
def test_every_name(name: str, dtype: str, *, equalize: bool) -> None:
    torch.manual_seed(1)
    model, (example, *calibration) = Net().eval(), [torch.randn(4, 3, 12, 12) for _ in range(5)]
    backend = ArmInductorBackend(activation_dtype=dtype)

    reference = quantize(model, example, backend, calibration, observers=name, equalize=equalize)

    assert audit(reference, backend).int8_count == 3
    assert sqnr_db(reference(example), model(example)) > 25
