"""Whole models over all data, and the user's own metric."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from versatil_core import ReportError
from versatil_core.export import ModelInputs
from versatil_core.model_accuracy import (
    check_alike,
    check_metric,
    measure_metric,
    output_errors,
    run_on,
)
from versatil_core.report_result import MetricResult


def call(*args: torch.Tensor) -> ModelInputs:
    return ModelInputs(args, {})


def scaled(factor: float) -> Callable[..., Any]:
    return lambda x: {"out": x * factor, "ids": x.argmax()}


def test_errors_add_up_over_batches() -> None:
    batches = [call(torch.tensor([3.0, 0.0])), call(torch.tensor([0.0, 4.0]))]
    seen: list[None] = []

    errors = output_errors(
        scaled(1.0), scaled(0.9), scaled(0.5), batches, on_batch=lambda: seen.append(None)
    )

    assert errors.int8_to_float.db == pytest.approx(20 * math.log10(2))
    assert errors.reference_to_float.db == pytest.approx(20)
    assert errors.int8_to_reference.db == pytest.approx(20 * math.log10(0.9 / 0.4))
    assert errors.cosine == pytest.approx(1.0)
    assert errors.max_error == 2.0
    assert len(seen) == 2


def test_cosine() -> None:
    errors = output_errors(
        lambda x: x, lambda x: x, lambda x: x.flip(0), [call(torch.tensor([1.0, 0.0]))]
    )
    assert errors.cosine == 0.0
    zeros = output_errors(lambda x: x, lambda x: x, lambda x: x, [call(torch.zeros(2))])
    assert zeros.cosine == 1.0


def test_masks_of_infinity_do_not_spoil_the_numbers() -> None:
    x = torch.tensor([1.0, -math.inf])
    errors = output_errors(lambda x: x, lambda x: x, lambda x: x * 1.1, [call(x)])
    assert errors.int8_to_float.db == pytest.approx(20)
    assert errors.max_error == pytest.approx(0.1)


def test_a_model_may_write_to_its_inputs() -> None:
    x = torch.ones(2)
    assert torch.equal(run_on(lambda x: x.add_(1), call(x)), torch.full((2,), 2.0))
    assert torch.equal(x, torch.ones(2))


@pytest.mark.parametrize(
    ("of_float", "message"),
    [
        (
            lambda x: x[:1],
            "the float model returns 1, and the quantized one 2: it is not the model",
        ),
        (lambda x: (x, x), "returns 2, 2, and the quantized one 2"),
        (lambda x: x.sum(), "returns a scalar, and"),
        (lambda _: None, "returns no tensor, and"),
        (lambda x: x.no_such(), "fails on the first batch: AttributeError: .* is it the model"),
    ],
)
def test_another_model_is_refused(of_float: Callable[..., Any], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        check_alike(of_float, lambda x: x, call(torch.ones(2)))


def test_a_number_is_named_after_the_metric() -> None:
    def top1(model: Callable[..., Any]) -> float:
        return float(model(torch.ones(1)))

    assert measure_metric(top1, {"float": lambda x: x, "int8": lambda x: x / 2}) == (
        MetricResult("top1", 1.0, 0.5),
    )


def test_several_numbers_have_their_names() -> None:
    found = measure_metric(
        lambda model: {"a": model(torch.ones(1)), "b": 2}, {"float": float, "int8": float}
    )
    assert found == (MetricResult("a", 1.0, 1.0), MetricResult("b", 2.0, 2.0))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda model: model.no_such, "failed on the float model: AttributeError"),
        (lambda _: "good", "failed on the float model: ValueError: could not convert"),
        (lambda _: None, "takes a model, and returns a number"),
        (lambda _: math.nan, "returned <lambda> = nan for the float model"),
        (lambda _: {"a": math.inf}, "returned a = inf"),
    ],
)
def test_a_bad_metric_is_explained(metric: Any, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        check_metric(metric, lambda x: x)


def test_a_metric_with_other_names_is_refused() -> None:
    answers = iter([{"a": 1.0}, {"b": 1.0}])
    with pytest.raises(ReportError, match="returned a for the float model, and b for the int8"):
        measure_metric(lambda _: next(answers), {"float": float, "int8": float})


def test_integers_are_compared_as_such() -> None:
    call_ = call(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    errors = output_errors(
        lambda x: x.long(), lambda x: x.long(), lambda x: (x + (x > 3)).long(), [call_, call_]
    )

    assert not errors.has_floats
    assert errors.equal_share == 0.75
    assert errors.max_error == 1.0


def test_state_is_put_back_before_each_run() -> None:
    state = [0]

    def counting(x: torch.Tensor) -> torch.Tensor:
        state[0] += 1
        return x * state[0]

    def reset() -> None:
        state[0] = 0

    errors = output_errors(
        counting, counting, counting, [call(torch.ones(2))] * 2, before_run=reset
    )

    assert errors.int8_to_float.db == math.inf


def test_a_metric_may_change_the_mode() -> None:
    model = torch.nn.Dropout()

    def careless(model: Any) -> float:
        model.train()
        return 1.0

    check_metric(careless, model)
    assert not model.training
