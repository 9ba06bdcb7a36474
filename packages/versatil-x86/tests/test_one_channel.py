"""A convolution of one channel compiles for any batch: Inductor is wrong about the kernel's memory layout there."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from versatil_core import audit, compile, quantize, sqnr_db  # noqa: A004 -- the verb
from versatil_x86 import X86InductorBackend

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


class OneChannel(nn.Module):
    """Grey images at the front, a mask of one channel in the middle, and a conv1d of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.mask = nn.Conv2d(8, 1, 1)
        self.spread = nn.Conv2d(1, 6, 3)
        self.row = nn.Conv1d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        x = functional.relu(self.block(x) + x)
        x = functional.relu(self.spread(torch.sigmoid(self.mask(x)))).mean((2, 3))
        return self.row(x.unsqueeze(1))


@pytest.mark.parametrize(
    "is_dynamic",
    [False, pytest.param(True, marks=pytest.mark.dynamic_convolution)],
    ids=["static", "dynamic"],
)
def test_any_batch(*, is_dynamic: bool) -> None:
    """The first batch compiles with a shortcut of torch's for less than 16; the second without it."""
    torch.manual_seed(0)
    x, larger = torch.randn(4, 1, 9, 9), torch.randn(20, 1, 9, 9)
    backend = X86InductorBackend(is_dynamic=is_dynamic, saturation="safe")
    dynamic_shapes = ({0: torch.export.Dim("batch")},)
    reference = quantize(
        OneChannel().eval(), x, backend, None if is_dynamic else [x], dynamic_shapes=dynamic_shapes
    )
    assert audit(reference, backend).int8_count == 5

    compiled = compile(reference, backend)

    for batch in (x, larger):
        assert sqnr_db(compiled(batch), reference(batch)) > 60
