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


def test_samples_are_counted(linear_backend: Backend) -> None:
    shapes = {"x": {0: Dim("n")}, "y": {0: Dim("n")}}
    loader = ({"y": one(size, 4), "x": one(size, 4)} for size in (3, 5, 2))
    reference = quantize(
        TwoInputs(), (one(), one()), linear_backend(), loader, dynamic_shapes=shapes
    )

    info = reference_info(reference)
    assert (info.calibration_batches, info.calibration_samples) == (3, 10)


def test_patience_stops_when_nothing_moves(linear_backend: Backend) -> None:
    read = []

    def loader() -> Any:
        for index in range(100):
            read.append(index)
            yield torch.full((3, 4), 2.0 if index >= 4 else 1.0), one(3, 4) * 0

    reference = quantize(TwoInputs(), (one(), one()), linear_backend(), loader(), patience=3)

    # The range moves in the first batch and in the fifth.
    assert reference_info(reference).calibration_batches == 4
    assert len(read) == 4

    read.clear()
    reference = quantize(TwoInputs(), (one(), one()), linear_backend(), loader(), patience=4)
    assert reference_info(reference).calibration_batches == len(read) == 9


def test_slow_growth_is_a_move(linear_backend: Backend) -> None:
    """Each batch moves the range by half a percent: no two settle, all together are far."""
    growing = [(torch.full((3, 4), 1.005**i), torch.zeros(3, 4)) for i in range(40)]

    reference = quantize(TwoInputs(), (one(), one()), linear_backend(), growing, patience=5)

    assert reference_info(reference).calibration_batches == 40


@pytest.mark.parametrize("patience", [0, -1])
def test_patience_is_a_count(linear_backend: Backend, patience: int) -> None:
    with pytest.raises(CalibrationError, match=f"1 or more, got {patience}"):
        quantize(TwoInputs(), (one(), one()), linear_backend(), [(one(), one())], patience=patience)
