"""Weights are packed once, in the layout that the kernels want: none is laid out anew at a call."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from versatil_core import audit, compile, lower, quantize  # noqa: A004 -- the verb
from versatil_core.kernel_log import LoggedKernel, read_log
from versatil_x86 import X86InductorBackend

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)
Logged = Callable[[Callable[[], object]], list[LoggedKernel]]


@pytest.fixture
def logged(capfd: pytest.CaptureFixture[str]) -> Logged:
    """Run a call, and return the kernels that oneDNN logs."""

    def run(call: Callable[[], object]) -> list[LoggedKernel]:
        call()  # the first one fills caches
        capfd.readouterr()
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            call()
        return [*read_log(capfd.readouterr().out.splitlines())]

    return run


class Images(nn.Module):
    """Convolutions of the same sizes, behind a relu (zero point 0) and behind none; a wide one, and 1x1 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 64, 3, padding=1)
        self.second = nn.Conv2d(64, 64, 3, padding=1)
        self.third = nn.Conv2d(64, 64, 3, padding=1)
        self.wide = nn.Conv2d(64, 256, 3, stride=2)
        self.pointwise = nn.Conv2d(256, 64, 1)
        self.depthwise = nn.Conv2d(64, 64, 3, groups=64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x).relu()))
        x = self.depthwise(self.pointwise(torch.tanh(self.wide(x)))).relu()
        return self.head(x.mean((2, 3)))


class Rows(nn.Module):
    """Of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(64, 128, 3)
        self.second = nn.Conv1d(128, 64, 5, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Volumes(nn.Module):
    """Of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(16, 64, 3, padding=1)
        self.second = nn.Conv3d(64, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def weight_layouts(kernels: list[LoggedKernel]) -> list[LoggedKernel]:
    """Those that bring int8 into another layout."""
    return [
        kernel
        for kernel in kernels
        if kernel.primitive == "reorder" and kernel.dtypes in {"s8:s8", "s8"}
    ]


@pytest.mark.parametrize("is_batch_dynamic", [False, True])
@pytest.mark.parametrize(
    ("model", "shape", "count"),
    [
        (Images(), (2, 64, 20, 20), 7),
        (Rows(), (2, 64, 50), 2),
        (Volumes(), (2, 16, 6, 10, 10), 2),
    ],
    ids=["images", "rows", "volumes"],
)
def test_no_weight_is_laid_out_at_a_call(
    logged: Logged,
    model: nn.Module,
    shape: tuple[int, ...],
    count: int,
    *,
    is_batch_dynamic: bool,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    backend = X86InductorBackend(saturation="safe")
    sizes = ({0: torch.export.Dim("batch")},) if is_batch_dynamic else None
    reference = quantize(model.eval(), x, backend, [x], dynamic_shapes=sizes)
    assert audit(reference, backend).int8_count == count

    for module in (lower(reference, backend), compile(reference, backend)):
        kernels = logged(lambda module=module: module(x))  # type: ignore[misc]

        assert len([kernel for kernel in kernels if kernel.is_int8]) == count
        assert weight_layouts(kernels) == []


@pytest.mark.dynamic_convolution
def test_nor_with_a_measured_scale(logged: Logged) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64, 20, 20)
    backend = X86InductorBackend(is_dynamic=True, saturation="safe")
    model = nn.Sequential(nn.Conv2d(64, 256, 3), nn.Conv2d(256, 64, 1)).eval()

    lowered = lower(quantize(model, x, backend), backend)

    kernels = logged(lambda: lowered(x))
    assert len([kernel for kernel in kernels if kernel.is_int8]) == 2
    assert weight_layouts(kernels) == []


class Twice(nn.Module):
    """Two layers that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(torch.tanh(self.conv(x))))
        return self.linear(torch.tanh(self.linear(x.mean((2, 3)))))


@pytest.mark.parametrize(
    "is_dynamic", [False, pytest.param(True, marks=pytest.mark.dynamic_convolution)]
)
def test_a_layer_that_is_called_twice_has_one_packed_weight(*, is_dynamic: bool) -> None:
    x = torch.randn(2, 8, 9, 9)
    backend = X86InductorBackend(is_dynamic=is_dynamic, saturation="safe")
    reference = quantize(Twice().eval(), x, backend, [x])

    lowered = lower(reference, backend)

    assert audit(reference, backend).int8_count == 4
    packed = [
        name
        for name, value in lowered.named_buffers()
        if value.layout is torch._mkldnn  # type: ignore[attr-defined]
    ]
    assert len(packed) == 2
