"""Between layers whose kernels write float, the quantize comes first: pools and the like then read int8."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from versatil_arm import ArmInductorBackend
from versatil_core import check_exactness, compile, lower, quantize  # noqa: A004 - the verb


class Branches(nn.Module):
    """A pool, a relu and padding behind one layer, upsampling behind another, joined for a third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1, stride=4)
        self.end = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Any:
        a = functional.pad(functional.max_pool2d(self.a(x), 2).relu(), (1, 1))
        b = functional.interpolate(self.b(x).relu(), size=a.shape[2:])
        return self.end(torch.cat([a, b], 1))


class Pool(nn.Module):
    """A pool and a relu between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.b(functional.max_pool2d(self.a(x), 2).relu())


@pytest.mark.usefixtures("any_host")
@pytest.mark.parametrize("make", [lower, compile])
@pytest.mark.parametrize(
    ("model", "dtype", "kept"),
    [
        (Pool, "int8", "max_pool2d + relu -> int8"),
        (Pool, "uint8", "max_pool2d + relu -> uint8"),
        (Branches, "uint8", "upsample_nearest2d + cat -> uint8"),
        # torch has no nearest upsampling of int8: all of it stays float.
        (Branches, "int8", ""),
    ],
)
def test_the_judge(model: type[nn.Module], dtype: str, kept: str, make: Any) -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 16, 16)
    backend = ArmInductorBackend(activation_dtype=dtype)
    reference = quantize(model().eval(), batch, backend, [batch])

    report = check_exactness(reference, make(reference, backend), (2 * batch,))

    report.raise_if_inexact()
    found = [op.op for op in report.ops if " -> " in op.op and "conv" not in op.op]
    assert [name.endswith(kept) for name in found] == [True] * bool(kept)


def test_a_measured_scale_leaves_float_between() -> None:
    backend, x = ArmInductorBackend(is_dynamic=True), torch.randn(2, 3, 16, 16)
    reference = quantize(Pool().eval(), x, backend)
    targets = {str(node.target) for node in reference.graph.nodes}
    assert "quantized_decomposed.quantize_per_tensor.default" not in targets
