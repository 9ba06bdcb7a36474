"""Equalized transformers on x86 kernels: every linear is int8, every op exact, the result nearer to float."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from versatil_core import audit, check_exactness, lower, quantize, reference_info, sqnr_db
from versatil_x86 import X86InductorBackend

WIDTH, HEADS = 64, 4


class Block(nn.Module):
    """A post-norm block as in BERT, with large channels behind each layer norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.mixed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        with torch.no_grad():
            for norm in (self.first, self.second):
                norm.weight[::21] *= 40

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        heads = [
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = functional.scaled_dot_product_attention(*heads)
        x = self.second(x + self.mixed(attended.transpose(1, 2).flatten(2)))
        return self.last(x + self.down(functional.gelu(self.up(x))))


@pytest.mark.parametrize("saturation", ["safe", "reduce_range", "ignore"])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_block(saturation: str, *, is_dynamic: bool) -> None:
    model = Block().eval()
    example, *calibration = [torch.randn(2, 24, WIDTH) for _ in range(7)]
    backend = X86InductorBackend(is_dynamic=is_dynamic, saturation=saturation)

    plain = quantize(model, example, backend, calibration)
    reference = quantize(model, example, backend, calibration, equalize=True)

    projections, *_ = reference_info(reference).equalized
    assert projections.layers == ("query", "key", "value")
    assert projections.placement == "multiply", "the sum reads the layer norm, too"
    assert sqnr_db(reference(example), model(example)) > sqnr_db(plain(example), model(example)) + 2
    if saturation != "ignore":  # there, kernels without VNNI may differ
        assert check_exactness(reference, lower(reference, backend), (example,)).is_exact
    assert audit(reference, backend).int8_count == 6
