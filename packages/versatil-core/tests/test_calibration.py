"""A batch that does not fit is named, with what was expected and what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.utils.data import DataLoader, TensorDataset

from versatil_core import CalibrationError, quantize, reference_info

Backend = Callable[..., Any]


class TwoInputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.linear(x) + self.linear(y)


def one(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 4)))


@pytest.mark.parametrize(
    "batch",
    [
        (one(), one()),
        [one(), one()],
        {"x": one(), "y": one()},
        {"y": one(), "x": one()},
    ],
    ids=["tuple", "list", "mapping", "mapping in another order"],
)
def test_forms_of_a_batch(linear_backend: Backend, batch: Any) -> None:
    reference = quantize(TwoInputs(), (one(), one()), linear_backend(), [batch])

    assert reference_info(reference).calibration_batches == 1


def test_positional_batches_fit_an_example_by_name(linear_backend: Backend) -> None:
    example = {"x": one(), "y": one()}

    reference = quantize(TwoInputs(), example, linear_backend(), [(one(), one())])

    assert reference(**example).shape == (3, 4)


def test_a_data_loader(linear_backend: Backend) -> None:
    loader = DataLoader(TensorDataset(one(6, 4)), batch_size=3)

    reference = quantize(torch.nn.Linear(4, 4), one(), linear_backend(), loader)

    assert reference_info(reference).calibration_batches == 2


def test_labels_are_recognised(linear_backend: Backend) -> None:
    loader = DataLoader(TensorDataset(one(6, 4), torch.arange(6)), batch_size=3)

    with pytest.raises(CalibrationError, match=r"has 2 items, but the model takes 1.*labels"):
        quantize(torch.nn.Linear(4, 4), one(), linear_backend(), loader)


def test_too_few_items(linear_backend: Backend) -> None:
    with pytest.raises(CalibrationError, match=r"batch 0 has 1 items, but the model takes 2"):
        quantize(TwoInputs(), (one(), one()), linear_backend(), [one()])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (one(2, 4), r"expected the shape \(3, 4\), got \(2, 4\).*drop_last"),
        (one(3, 5), r"expected the shape \(3, 4\), got \(3, 5\)"),
        (one(4), r"it needs 2 dimensions"),
        (one().double(), r"expected torch\.float32, got torch\.float64"),
        (one() / 0 * 0, r"12 of 12 values are NaN or infinite"),
        (one().fill_(float("inf")), r"NaN or infinite"),
        ([1.0, 2.0], r"nested in another way"),
        (3.0, r"expected a tensor, got float"),
    ],
    ids=["batch", "features", "rank", "dtype", "nan", "inf", "list", "number"],
)
def test_a_bad_batch_is_named(linear_backend: Backend, bad: Any, reason: str) -> None:
    calibration = [(one(), one()), (one(), bad)]

    with pytest.raises(CalibrationError, match=reason) as error:
        quantize(TwoInputs(), (one(), one()), linear_backend(), calibration)

    assert error.value.batch_index == 1
    assert "batch 1" in str(error.value)


def test_the_input_is_named(linear_backend: Backend) -> None:
    with pytest.raises(CalibrationError, match=r"input 1 \(y\)") as error:
        quantize(TwoInputs(), (one(), one()), linear_backend(), [(one(), one(2, 4))])

    assert error.value.input_name == "y"


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"x": one()}, "lacks the inputs y"),
        ({"x": one(), "y": one(), "labels": one()}, "labels.*Remove"),
    ],
)
def test_names_have_to_agree(linear_backend: Backend, batch: Any, reason: str) -> None:
    with pytest.raises(CalibrationError, match=reason):
        quantize(TwoInputs(), (one(), one()), linear_backend(), [batch])


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [((9, 9), "dimension 0 must be in 1 … 8"), ((3, 2), "must be equal"), ((0, 0), "in 1 … 8")],
)
def test_dynamic_sizes_are_checked(
    linear_backend: Backend, sizes: tuple[int, int], reason: str
) -> None:
    batch = Dim("batch", min=1, max=8)
    first, second = sizes

    with pytest.raises(CalibrationError, match=reason):
        quantize(
            TwoInputs(),
            (one(), one()),
            linear_backend(),
            [(one(first, 4), one(second, 4))],
            dynamic_shapes=({0: batch}, {0: batch}),
        )


def test_one_tensor_is_no_iterable_of_batches(linear_backend: Backend) -> None:
    with pytest.raises(CalibrationError, match=r"pass \[tensor\]"):
        quantize(torch.nn.Linear(4, 4), one(), linear_backend(), one())


def test_calibration_takes_no_gradients(linear_backend: Backend) -> None:
    batch = one().requires_grad_()

    quantize(torch.nn.Linear(4, 4), one(), linear_backend(), [batch])

    assert batch.grad is None
