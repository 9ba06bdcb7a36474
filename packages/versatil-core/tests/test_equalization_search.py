"""The factors, and the choice of the exponent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from versatil_core import prepare
from versatil_core.equalization_groups import linear_groups
from versatil_core.equalization_search import (
    MAX_ROWS,
    GroupSimulation,
    InputRecorder,
    factors_of,
    search,
)
from versatil_core.export import export, model_inputs

Backend = Callable[..., Any]


def simulation(layer: nn.Linear, backend: Any) -> GroupSimulation:
    exported = export(layer, torch.randn(2, layer.in_features))
    [group] = linear_groups(exported)
    return GroupSimulation(group, prepare(exported, backend))


@pytest.mark.parametrize(
    ("alpha", "expected"), [(0.0, [1 / 4, 1, 4]), (1.0, [1 / 2, 1, 2]), (0.5, [1 / 4, 1, 4])]
)
def test_factors_are_those_of_the_paper(alpha: float, expected: list[float]) -> None:
    """Rounded to powers of two, around 1: the exponents of the last are -1.5, 0 and 1.5."""
    rows = [torch.tensor([[2.0, -4.0, 1.0]]), torch.tensor([[-1.0, 1.0, 8.0]])]
    weights = [torch.tensor([[4.0, 1.0, 0.25]]), torch.tensor([[-1.0, 0.5, 0.1]])]

    assert factors_of(rows, weights, alpha).tolist() == pytest.approx(expected)


def test_channels_of_zeros_get_no_factor() -> None:
    rows, weights = [torch.tensor([[0.0, 1.0, 4.0, 16.0]])], [torch.tensor([[1.0, 0.0, 1.0, 1.0]])]

    assert factors_of(rows, weights, 1.0).tolist() == [1.0, 1.0, 0.5, 2.0]
    assert factors_of([torch.zeros(2, 4)], weights, 1.0).tolist() == [1.0] * 4


def test_outliers_are_found(linear_backend: Backend) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(64, 32) for _ in range(2)]
    for part in rows:
        part[:, 3] *= 60

    found = search(simulation(nn.Linear(32, 16), linear_backend()), rows)

    assert found.alpha is not None
    assert found.alpha >= 0.3
    assert found.gain_db > 6


def test_what_the_other_half_does_not_confirm_is_no_gain(linear_backend: Backend) -> None:
    """A channel that is silent in one half and large in the other: no exponent is right."""
    torch.manual_seed(0)
    rows = [torch.randn(64, 16) for _ in range(2)]
    rows[0][:, :8] *= 1e-4
    rows[1][:, 8:] *= 1e-4

    found = search(simulation(nn.Linear(16, 16), linear_backend()), rows)

    assert found.alpha in {None, 0.0, 0.05}
    assert found.gain_db < 3


def test_the_error_is_never_above_that_of_no_change(linear_backend: Backend) -> None:
    torch.manual_seed(1)
    rows = [torch.randn(32, 8) for _ in range(2)]

    found = search(simulation(nn.Linear(8, 8), linear_backend(is_dynamic=True)), rows)

    assert found.gain_db >= 0


def test_rows_are_limited(linear_backend: Backend) -> None:
    exported = export(nn.Linear(4, 4), torch.randn(2, 700, 4))
    groups = linear_groups(exported)
    recorder = InputRecorder(exported, groups)

    recorder.record(model_inputs(torch.randn(2, 700, 4)))

    [kept] = recorder.rows[groups[0].source]
    assert kept.shape == (MAX_ROWS, 4)
    assert GroupSimulation(groups[0], prepare(exported, linear_backend())).fault == ""


def test_an_observer_without_a_range_cannot_be_simulated(linear_backend: Backend) -> None:
    exported = export(nn.Linear(4, 4), torch.randn(2, 4))
    prepared = prepare(exported, linear_backend())
    for module in prepared.modules():
        if hasattr(module, "quant_min"):
            del module.quant_min
    [group] = linear_groups(exported)

    assert "can't be simulated" in GroupSimulation(group, prepared).fault
