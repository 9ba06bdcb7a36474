"""Quantization-aware training with torchao's functions and this package's quantizer."""

from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

from versatil_arm import ArmInductorBackend
from versatil_core import audit, check_exactness, lower, sqnr_db


class Network(nn.Module):
    """A strided convolution, a grouped one, which stays float, a 1x1 one, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.grouped(torch.relu(self.stem(x))))
        return self.head(torch.relu(self.pointwise(y)).mean((2, 3)))


def trained(backend: ArmInductorBackend, x: torch.Tensor) -> torch.fx.GraphModule:
    """Prepared for training, and trained for a few steps."""
    torch.manual_seed(0)
    exported = torch.export.export(Network().train(), (x,)).module()
    prepared: torch.fx.GraphModule = prepare_qat_pt2e(exported, backend.create_quantizer())
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = (prepared(x) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return prepared


# Under emulation only the first two: each takes a while there.
@pytest.mark.parametrize(
    ("dtype", "is_per_channel", "is_dynamic"),
    [
        ("int8", True, False),
        ("uint8", False, False),
        pytest.param("uint8", True, False, marks=pytest.mark.portable),
        pytest.param("int8", False, False, marks=pytest.mark.portable),
        pytest.param("int8", True, True, marks=pytest.mark.portable),
        pytest.param("uint8", False, True, marks=pytest.mark.portable),
    ],
)
@pytest.mark.usefixtures("any_host")
def test_a_trained_model_is_int8(dtype: str, *, is_per_channel: bool, is_dynamic: bool) -> None:
    x = 0.5 * torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"is_dynamic": is_dynamic, "is_per_channel": is_per_channel}
    training = ArmInductorBackend(**options, is_qat=True, activation_dtype=dtype)
    prepared = trained(training, x)
    fakes = [m for m in prepared.modules() if "FakeQuantize" in type(m).__name__]
    assert len(fakes) >= 6  # activation and weight of three layers
    move_exported_model_to_eval(prepared)
    wanted = prepared(x).detach()

    reference = convert_pt2e(prepared)

    backend = ArmInductorBackend(**options, activation_dtype=dtype)
    layers = {layer.module_path: layer for layer in audit(reference, backend).layers}
    assert [path for path, layer in layers.items() if layer.is_int8] == [
        *("stem", "pointwise", "head")
    ]
    assert "2 groups" in (layers["grouped"].reason or "")
    assert sqnr_db(reference(x), wanted) > 25
    with torch.no_grad():
        lowered = lower(reference, backend)
        check_exactness(reference, lowered, (x,)).raise_if_inexact()
