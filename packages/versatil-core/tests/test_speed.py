"""Configurations of the speed measurement, and what one interleaved run sums up to."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from versatil_core import InputError, quantize
from versatil_core.export import ModelInputs
from versatil_core.latency import Judgement, LatencyComparison, LatencySummary
from versatil_core.recorded_values import own_inputs
from versatil_core.speed import (
    sample_count,
    speed_point,
    torch_threads,
    with_batch,
)


def summary(*samples: float) -> LatencySummary:
    return LatencySummary(samples)


def test_speed_point() -> None:
    latency = LatencyComparison(
        {
            "float eager": summary(*[6.0] * 10),
            "float compiled": summary(*[4.0] * 10),
            "int8": summary(*[2.0] * 10),
        }
    )

    found = speed_point(latency, 3, 5, [(5, 2), (7,)])

    assert (found.threads, found.batch, found.rounds) == (3, 5, 10)
    assert found.input_shapes == ((5, 2), (7,))
    assert (found.float_eager.median, found.float_compiled.median, found.int8.median) == (6, 4, 2)
    assert found.speedup.median == 2.0
    assert found.speedup_eager.median == 3.0
    assert found.judgement is Judgement.FASTER


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with torch_threads(before + 1):
            raise OSError(torch.get_num_threads())

    with pytest.raises(OSError, match=str(before + 1)):
        fail()
    assert torch.get_num_threads() == before


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * mask.t() + table.sum()


def inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.arange(batch * 8.0).view(batch, 8), torch.ones(8, batch), torch.ones(3)


def test_the_batch_is_changed_wherever_it_is(linear_backend: Any) -> None:
    size = torch.export.Dim("batch", max=16)
    reference = quantize(
        Pair().eval(),
        inputs(4),
        linear_backend(is_dynamic=True),
        dynamic_shapes=({0: size}, {1: size}, None),
    )
    call = ModelInputs(inputs(3), {})

    for wanted in (1, 3, 8):
        x, mask, table = with_batch(reference, call, wanted).args
        assert x.shape == (wanted, 8)
        assert mask.shape == (8, wanted)
        assert table.shape == (3,)
        samples = itertools.islice(itertools.cycle(call.args[0]), wanted)
        assert all(torch.equal(got, sample) for got, sample in zip(x, samples, strict=True))
    with pytest.raises(InputError, match=r"batch size 17: input 0 \(x\): .* must be in 1 … 16"):
        with_batch(reference, call, 17)


def test_a_fixed_batch_stays(linear_backend: Any) -> None:
    reference = quantize(Pair().eval(), inputs(4), linear_backend(is_dynamic=True))
    call = ModelInputs(inputs(4), {})

    assert with_batch(reference, call, 4) is call
    with pytest.raises(InputError, match="batch size 8: the model was quantized for 4 samples"):
        with_batch(reference, call, 8)


def test_the_batch_is_where_sizes_vary(linear_backend: Any) -> None:
    """Not the first size of the first input, if that one is fixed."""

    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)[:, index]

    size = torch.export.Dim("batch", max=16)
    example = torch.arange(5), torch.randn(4, 8)
    reference = quantize(
        Indexed().eval(), example, linear_backend(is_dynamic=True), dynamic_shapes=(None, {0: size})
    )
    call = ModelInputs(example, {})

    assert sample_count(reference, call) == 4
    index, x = with_batch(reference, call, 2).args
    assert (index.shape, x.shape) == ((5,), (2, 8))


def test_inputs_of_the_right_size_keep_their_memory_format(linear_backend: Any) -> None:
    size = torch.export.Dim("batch", max=16)
    images = torch.rand(4, 8, 8, 8).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    reference = quantize(
        model, images, linear_backend(is_dynamic=True), dynamic_shapes=({0: size},)
    )
    call = ModelInputs((images,), {})

    assert with_batch(reference, call, 4) is call


def test_the_data_of_the_caller_are_not_written_to() -> None:
    x = torch.ones(2)

    own_inputs(ModelInputs((x,), {})).args[0].mul_(2)

    assert torch.equal(x, torch.ones(2))
