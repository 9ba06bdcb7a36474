"""Quantization-aware training for Arm: the trained model runs on the same int8 kernels, exactly."""

import pytest
import torch
from torch import nn

from versatil_arm import ArmInductorBackend
from versatil_core import (
    audit,
    check_exactness,
    convert,
    freeze_batch_norm_statistics,
    freeze_ranges,
    lower,
    prepare_qat,
    quantize,
    sqnr_db,
)


class Network(nn.Module):
    """Batch norms behind a strided convolution, a grouped one, which stays float, a 1x1 one, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.grouped_norm = nn.BatchNorm2d(8)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.pointwise_norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8, 16)
        self.hidden_norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(x + self.grouped_norm(self.grouped(x)))
        x = torch.relu(self.pointwise_norm(self.pointwise(x)) + x)
        x = torch.relu(self.hidden_norm(self.hidden(x.mean((2, 3)))))
        return self.head(self.dropout(x))


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
def test_a_trained_model_is_int8_and_exact(
    dtype: str, *, is_per_channel: bool, is_dynamic: bool
) -> None:
    torch.manual_seed(0)
    model, x = Network(), 0.5 * torch.randn(8, 3, 10, 10)
    backend = ArmInductorBackend(
        is_dynamic=is_dynamic, is_per_channel=is_per_channel, activation_dtype=dtype
    )
    trainable = prepare_qat(model, x, backend)
    optimizer = torch.optim.SGD(trainable.parameters(), lr=0.05)
    losses = []
    for step in range(8):
        if step == 6:
            freeze_batch_norm_statistics(trainable)
            freeze_ranges(trainable)
        loss = (trainable(x) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

    reference = convert(trainable.eval())

    with torch.no_grad():
        assert sqnr_db(reference(x), trainable(x)) > 100
        check_exactness(reference, lower(reference, backend), (x,)).raise_if_inexact()
    layers = [(layer.module_path, layer.is_int8) for layer in audit(reference, backend).layers]
    assert [path for path, is_int8 in layers if is_int8] == ["stem", "pointwise", "hidden", "head"]
    post_training = audit(quantize(model, x, backend, [x]), backend)
    assert layers == [(layer.module_path, layer.is_int8) for layer in post_training.layers]
