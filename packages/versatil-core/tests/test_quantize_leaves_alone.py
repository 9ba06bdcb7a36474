"""What quantize() must not touch: random numbers, the model's own buffers, other threads."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from versatil_core import (
    LoweringError,
    ModelFileError,
    VersatilError,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    load,
    lower,
    quantize,
    save,
)

Backend = Callable[..., Any]


class Counter(torch.nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.linear(x) * 0 + self.calls


def test_random_numbers_go_on_as_before(linear_backend: Backend) -> None:
    x = torch.randn(2, 8)
    model = torch.nn.Linear(8, 4)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)

    quantize(model, x, linear_backend(), calibration=[x])

    assert torch.equal(torch.rand(1), expected)


def test_buffers_are_as_before_calibration(linear_backend: Backend) -> None:
    x = torch.randn(2, 8)

    reference = quantize(Counter(), x, linear_backend(), calibration=[x, x, x])

    assert torch.equal(reference(x), torch.ones(2, 8))


def test_threads_may_quantize_at_once(linear_backend: Backend) -> None:
    x = torch.randn(2, 8)
    failures: list[Exception] = []

    def work() -> None:
        try:
            quantize(torch.nn.Linear(8, 4), x, linear_backend(), calibration=[x])
        except Exception as error:  # noqa: BLE001 -- shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert failures == []


def test_the_judge_refuses_a_model_of_another_reference(linear_backend: Backend) -> None:
    x = torch.randn(2, 8)
    backend = linear_backend()
    model = torch.nn.Linear(8, 4)
    first = quantize(model, x, backend, calibration=[x])
    second = quantize(model, x, backend, calibration=[x * 2])

    with pytest.raises(LoweringError, match="compiled from another reference"):
        check_exactness(first, compile(second, backend), (x,))


def test_the_judge_looks_past_an_attention_mask(linear_backend: Backend) -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.register_buffer("mask", torch.full((8,), -torch.inf).where(torch.arange(8) > 4, 0))

        def forward(self, x: torch.Tensor) -> Any:
            return (self.linear(x) + self.mask).softmax(-1)

    x = torch.randn(2, 8)
    backend = linear_backend()
    reference = quantize(Masked(), x, backend, calibration=[x])

    assert check_exactness(reference, lower(reference, backend), (x,)).is_exact


def test_what_is_no_reference_is_not_saved(linear_backend: Backend, tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    backend = linear_backend()
    reference = quantize(torch.nn.Linear(8, 4), x, backend, calibration=[x])
    path = tmp_path / "model.pt2"

    others: list[Any] = [torch.nn.Linear(8, 4), compile(reference, backend)]
    for other in others:
        with pytest.raises(VersatilError, match="must come from"):
            save(other, path)
    assert not path.exists()


def test_a_flipped_bit_is_found(linear_backend: Backend, tmp_path: Path) -> None:
    x = torch.randn(2, 64)
    reference = quantize(torch.nn.Linear(64, 64), x, linear_backend(), calibration=[x])
    path = tmp_path / "model.pt2"
    save(reference, path)
    content = bytearray(path.read_bytes())
    position = content.find(_weight_bytes(reference)[:64])
    assert position > 0
    content[position + 3] ^= 1
    path.write_bytes(content)

    with pytest.raises(ModelFileError, match="Bad CRC-32"):
        load(path)


def _weight_bytes(reference: torch.fx.GraphModule) -> bytes:
    weights = [value for value in reference.state_dict().values() if value.dtype is torch.int8]
    return weights[0].numpy().tobytes()
