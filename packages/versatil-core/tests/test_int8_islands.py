"""Which layers hang together as int8."""

from typing import Any

import pytest
import torch
from torch import nn

from versatil_core import quantize
from versatil_core.int8_islands import joined_layers
from versatil_core.lower import lowered_copy


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


@pytest.mark.parametrize(
    ("layers", "joined"),
    [
        ([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)], {"linear_1", "linear_2"}),
        # A view moves int8 as well as float: the quantize is lifted over it.
        ([nn.Linear(8, 8), Transposed(), nn.Linear(4, 8)], {"linear_1"}),
        # A float operation lies between; this backend cannot fuse it.
        ([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)], set()),
        ([nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)], set()),
        ([nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)], set()),
    ],
)
def test_joined_layers(layers: list[nn.Module], joined: set[str], linear_backend: Any) -> None:
    x = torch.randn(4, 8)
    backend = linear_backend(quant_max=255)
    reference = quantize(nn.Sequential(*layers).eval(), x, backend, [x])

    assert joined_layers(*lowered_copy(reference, backend.lowering_rules)) == joined


def test_a_dynamic_layer_measures_float(linear_backend: Any) -> None:
    backend = linear_backend(is_dynamic=True)
    reference = quantize(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8), backend
    )

    assert joined_layers(*lowered_copy(reference, backend.lowering_rules)) == set()
