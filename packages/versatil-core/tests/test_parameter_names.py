"""Int8 weights keep the names of the float ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from versatil_core import export, quantize
from versatil_core.calibration import calibrate
from versatil_core.convert import convert
from versatil_core.prepare import prepare

Backend = Callable[..., Any]


def names(reference: GraphModule, dtype: torch.dtype = torch.int8) -> list[str]:
    return [name for name, value in reference.state_dict().items() if value.dtype is dtype]


def test_weights_scales_and_biases(linear_backend: Backend) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 4, bias=False)))
    x = torch.randn(3, 8)

    reference = quantize(model, x, linear_backend(), [x])

    assert names(reference) == ["0.weight", "1.1.weight"]
    assert names(reference, torch.float32) == ["0.bias", "0.weight_scale", "1.1.weight_scale"]
    assert names(reference, torch.int64) == ["0.weight_zero_point", "1.1.weight_zero_point"]
    state = reference.state_dict()
    weight = state["0.weight"] * state["0.weight_scale"][:, None]
    assert torch.allclose(
        weight, model.state_dict()["0.weight"], atol=float(state["0.weight_scale"].max())
    )


def test_step_by_step_gives_the_same_names(linear_backend: Backend) -> None:
    x = torch.randn(3, 8)
    prepared = prepare(export(nn.Linear(8, 6), x), linear_backend())
    calibrate(prepared, [x], x)

    assert names(convert(prepared)) == ["weight"]


class Shared(nn.Module):
    """One weight, read by two layers and by a float function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + self.first.weight.sum()


def test_a_weight_that_is_also_read_as_float(linear_backend: Backend) -> None:
    x = torch.randn(3, 8)

    reference = quantize(Shared(), x, linear_backend(), [x])

    # torch.export knows a shared weight by one of its names.
    state = reference.state_dict()
    assert state["second.weight"].dtype is torch.float32
    assert names(reference) == ["second.weight_1"]


def test_dynamic_quantization(linear_backend: Backend) -> None:
    reference = quantize(nn.Linear(8, 6), torch.randn(3, 8), linear_backend(is_dynamic=True))

    assert names(reference) == ["weight"]
