"""Models that make a report difficult: with state, and with sizes that depend on values."""

from typing import Any

import torch
from torch import nn

from versatil_core import quantize, report


class Stateful(nn.Module):
    """Counts its calls, and adds the count to its result."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) + self.calls


def test_state_is_put_back(linear_backend: Any) -> None:
    backend = linear_backend(quant_max=255)
    torch.manual_seed(0)
    stateful, x = Stateful().eval(), torch.randn(16, 8)
    reference = quantize(stateful, x, backend, [x])
    before = {name: buffer.clone() for name, buffer in reference.named_buffers()}

    found = report(stateful, reference, backend, [x, x], parts=["accuracy"])

    assert found.accuracy is not None
    assert found.accuracy.reference_sqnr_db is not None
    assert found.accuracy.reference_sqnr_db > 20
    assert any("writes to its own buffers" in note for note in found.notes)
    assert stateful.calls == 0
    assert all(torch.equal(buffer, before[name]) for name, buffer in reference.named_buffers())


def test_sizes_that_depend_on_values(linear_backend: Any) -> None:
    """A row that passes the test in one model and not in the other leaves nothing to compare."""
    backend = linear_backend(quant_max=255)

    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.second(y[y.sum(-1) > 0]).sum(0)

    torch.manual_seed(0)
    selecting, x = Selecting().eval(), torch.randn(4000, 8)
    reference = quantize(selecting, x, backend, [x])

    found = report(selecting, reference, backend, [x], parts=["accuracy"])

    first, second = found.layers
    assert first.accuracy is not None
    assert second.accuracy is None or second.accuracy.introduced_db < 100


class Remembering(nn.Module):
    """Its next result depends on its last one."""

    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x + self.last))
        self.last.copy_(y)
        return y


def test_a_state_makes_no_kernel_inexact(linear_backend: Any) -> None:
    torch.manual_seed(0)
    model, backend, x = Remembering().eval(), linear_backend(quant_max=255), torch.randn(4, 8)
    reference = quantize(model, x, backend, [x])

    found = report(model, reference, backend, [x, x], parts=["accuracy"])

    assert found.accuracy is not None
    assert found.accuracy.is_exact
    assert not reference.get_buffer("last").any()


def test_integers_alone_have_no_sqnr(linear_backend: Any) -> None:
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).argmax(-1)

    torch.manual_seed(0)
    model, backend, x = Largest().eval(), linear_backend(quant_max=255), torch.randn(64, 8)
    reference = quantize(model, x, backend, [x])

    found = report(model, reference, backend, [x], parts=["accuracy"])
    other = report(Largest().eval(), reference, backend, [x], parts=["accuracy"])

    assert found.accuracy is not None
    assert other.accuracy is not None
    assert found.accuracy.sqnr_db is None
    assert found.accuracy.equal_share is not None
    assert found.accuracy.equal_share > 0.9
    assert other.accuracy.equal_share is not None
    assert other.accuracy.equal_share < 0.5
    assert "of the integers equal" in found.verdict.sentence


def test_other_weights_are_suspected(linear_backend: Any) -> None:
    backend, x = linear_backend(quant_max=255), torch.randn(64, 8)
    first, second = nn.Linear(8, 8).eval(), nn.Linear(8, 8).eval()
    reference = quantize(first, x, backend, [x])

    same, other = (report(m, reference, backend, [x], parts=["accuracy"]) for m in (first, second))

    assert not any("the same weights" in note for note in same.notes)
    assert any("the same weights" in note for note in other.notes)
