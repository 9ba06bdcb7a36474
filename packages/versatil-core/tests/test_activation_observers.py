"""Each observer chooses the range that its definition says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from versatil_core import (
    CalibrationError,
    QuantizationTarget,
    TargetError,
    quantize,
    reference_info,
)
from versatil_core.activation_observers import (
    OBSERVERS,
    EntropyObserver,
    MSEObserver,
    PercentileObserver,
    ValueCounts,
)
from versatil_core.observer_choice import OBSERVER_NAMES

Backend = Callable[..., Any]


def observed(cls: Any, *batches: torch.Tensor) -> tuple[float, int]:
    observer = cls(dtype=torch.uint8, qscheme=torch.per_tensor_affine, quant_min=0, quant_max=255)
    for batch in batches:
        assert observer(batch) is batch
    scale, zero_point = observer.calculate_qparams()
    return float(scale), int(zero_point)


def error(values: torch.Tensor, scale: float, zero_point: int) -> float:
    fake = torch.fake_quantize_per_tensor_affine(values, scale, zero_point, 0, 255)
    return float((fake - values).square().mean())


def gaussian(count: int = 100_000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def test_the_names_are_the_observers() -> None:
    assert tuple(OBSERVERS) == OBSERVER_NAMES


@settings(max_examples=200, deadline=None)
@example([65537.0, -6.353937341552207e-12])  # once counted as not negative
@example([1.0, 2.0, 4.0])  # each on the edge of a bin
@example([0.0, 0.25])
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_counts_are_kept_whatever_the_order(values: list[float]) -> None:
    together, apart = ValueCounts(), ValueCounts()
    together.add(torch.tensor(values))
    for value in reversed(values):
        apart.add(torch.tensor([value]))

    assert float(together.counts.sum()) == float(apart.counts.sum()) == len(values)
    assert float(together.limit) == float(apart.limit)
    assert torch.equal(together.counts, apart.counts)


def test_percentile_cuts_off_what_is_rare() -> None:
    values = torch.cat([gaussian(), torch.tensor([1000.0])])

    scale, zero_point = observed(PercentileObserver, values)

    low, high = -zero_point * scale, (255 - zero_point) * scale
    assert low == pytest.approx(float(values.quantile(0.00005)), abs=0.3)
    assert high == pytest.approx(float(values.quantile(0.99995)), abs=0.3)


@pytest.mark.parametrize("cls", [MSEObserver, EntropyObserver])
def test_an_outlier_is_cut_off(cls: Any) -> None:
    values = torch.cat([gaussian(1_000_000), torch.tensor([20.0])])
    plain = observed(OBSERVERS["min_max"], values)

    chosen = observed(cls, values)

    assert chosen[0] < plain[0] / 1.5


def test_mse_has_the_least_error() -> None:
    values = gaussian()
    by_name = {name: error(values, *observed(cls, values)) for name, cls in OBSERVERS.items()}

    assert by_name["mse"] < by_name["min_max"]
    assert by_name["mse"] <= min(by_name.values()) * 1.02


# With the second, only the smallest value is in the first bin that holds any.
FEW_VALUES = [
    torch.rand(50, generator=torch.Generator().manual_seed(seed)) + 1 for seed in (0, 193)
]


@pytest.mark.parametrize("cls", OBSERVERS.values(), ids=OBSERVERS)
@pytest.mark.parametrize(
    "values", [torch.zeros(4), torch.full((4,), 3.0), torch.full((4,), -3.0), *FEW_VALUES]
)
def test_ranges_hold_zero_and_are_usable(cls: Any, values: torch.Tensor) -> None:
    scale, zero_point = observed(cls, values)

    assert scale > 0
    assert 0 <= zero_point <= 255
    assert error(values, scale, zero_point) <= (0.02 * float(values.abs().max())) ** 2


@pytest.mark.parametrize("cls", [PercentileObserver, MSEObserver, EntropyObserver])
def test_uniform_values_are_not_cut_off(cls: Any) -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(0))

    scale, _ = observed(cls, values)

    assert scale == pytest.approx(1 / 255, rel=0.03)


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_zeros_do_not_make_a_range_narrower(share: float) -> None:
    """As a relu leaves them; no range rounds a zero."""
    values = gaussian().abs()
    scale, _ = observed(EntropyObserver, values)

    zeros = torch.zeros(int(len(values) * share / (1 - share)))
    with_zeros, zero_point = observed(EntropyObserver, torch.cat([values, zeros]))

    assert zero_point == 0
    assert with_zeros == scale > float(values.max()) * 0.8 / 255


def test_batches_are_counted_together() -> None:
    values = torch.cat([gaussian(), torch.tensor([20.0])])

    assert observed(MSEObserver, values) == observed(MSEObserver, *values.split(1000))


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.a(x) ** 3)


def scales(backend: Any, observers: Any) -> list[float]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) ** 5
    reference = quantize(Two(), x, backend, [x], observers=observers)
    return [
        float(node.args[1])
        for node in reference.graph.nodes
        if str(node.target) == "quantized_decomposed.quantize_per_tensor.default"
    ]


def test_observers_by_layer(linear_backend: Backend) -> None:
    backend = linear_backend()
    everywhere, nowhere = scales(backend, "min_max"), scales(backend, None)
    assert all(a != b for a, b in zip(everywhere, nowhere, strict=True))

    assert scales(backend, {"a": "min_max"}) == [everywhere[0], nowhere[1]]
    assert scales(backend, {"": "mse", "*": "min_max"}) == everywhere


@pytest.mark.parametrize("name", OBSERVER_NAMES)
def test_every_name_works(linear_backend: Backend, name: str) -> None:
    x = torch.randn(16, 8)
    reference = quantize(Two(), x, linear_backend(), [x], observers=name)

    assert reference(x).shape == (16, 8)
    assert reference_info(reference).observers == {"": name}


def test_what_is_wrong_is_told(linear_backend: Backend) -> None:
    x = torch.randn(16, 8)
    backend = linear_backend()
    with pytest.raises(CalibrationError, match=r"'mes': choose one of .*; did you mean 'mse'\?"):
        quantize(Two(), x, backend, [x], observers="mes")
    with pytest.raises(TargetError, match="path 'c'"):
        quantize(Two(), x, backend, [x], observers={"c": "mse"})
    with pytest.raises(CalibrationError, match="nothing to do in 'b'"):
        quantize(Two(), x, QuantizationTarget("a", backend), [x], observers={"b": "mse"})
    mixed = [
        QuantizationTarget("a", backend),
        QuantizationTarget("b", linear_backend(is_dynamic=True)),
    ]
    with pytest.raises(CalibrationError, match="nothing to do in 'b'"):
        quantize(Two(), x, mixed, [x], observers={"a": "mse", "b": "mse"})


@pytest.mark.parametrize("observers", ["mse", {"a": "mse", "b": "entropy"}])
@pytest.mark.parametrize("equalize", [False, True])
def test_only_measured_scales_are_told_before_any_work(
    linear_backend: Backend, observers: Any, *, equalize: bool
) -> None:
    """Neither does the model run, as an export lets it, nor is calibration data read."""
    ran = []

    class Watched(Two):
        def forward(self, x: torch.Tensor) -> Any:
            ran.append(x)
            return super().forward(x)

    x, backend = torch.randn(16, 8), linear_backend(is_dynamic=True)
    batches = iter([x, x])
    targets = [QuantizationTarget("a", backend), QuantizationTarget("b", backend)]
    for where in (backend, targets):
        with pytest.raises(CalibrationError, match=r"Leave observers out, or .* is_dynamic=False"):
            quantize(Watched(), x, where, batches, observers=observers, equalize=equalize)

    assert not ran
    assert len([*batches]) == 2
    quantize(Watched(), x, backend)
    assert ran
