"""Brings a batch into the form of the example inputs, and checks that it fits."""

from collections.abc import Sequence
from typing import Any

from versatil_core import _torch_compat
from versatil_core.export import ModelInputs, model_inputs
from versatil_core.input_check import input_faults
from versatil_core.reference_info import InputSpec


class BatchError(Exception):
    """What is wrong with a batch, to be put behind its name; callers raise an error of their own.

    Attributes:
        input_name: Which input of the model; None if the fault is not in one input.
    """

    def __init__(self, text: str, *, input_name: str | None = None) -> None:
        """Keep which input it is."""
        super().__init__(text)
        self.input_name = input_name


def checked_call(
    batch: Any, specs: Sequence[InputSpec], example: ModelInputs, input_names: Sequence[str]
) -> ModelInputs:
    """Bring a batch into the form of the example, by position or by name, and check its values.

    Args:
        batch: A tensor, a tuple or list of inputs, or a mapping of inputs by name.
        specs: What the model takes.
        example: The inputs that the model was exported with.
        input_names: Names of the model's positional inputs, so that a mapping fits them too.

    Raises:
        BatchError: It does not fit, or has NaN or infinity in it.
    """
    call = _as_call(batch, example, input_names)
    for fault in input_faults(specs, call.leaves, check_finite=True):
        raise BatchError(f", {fault}", input_name=fault.input_name)
    return call


def _as_call(batch: Any, example: ModelInputs, input_names: Sequence[str]) -> ModelInputs:
    """Bring a batch into the form of the example: by position, or by name."""
    call = model_inputs(batch)
    if example.kwargs and not example.args and call.args:
        call = _named(call, tuple(example.kwargs))
    elif call.kwargs and not example.kwargs:
        call = _positional(call, input_names[: len(example.args)])
    _check_count(call, example)
    if call.kwargs:
        call = ModelInputs(call.args, {name: call.kwargs[name] for name in example.kwargs})
    if not _torch_compat.same_structure(call.args, call.kwargs, (example.args, example.kwargs)):
        raise BatchError(
            f" is nested in another way than the example inputs: "
            f"expected {_structure(example)}, got {_structure(call)}",
        )
    return call


def _named(call: ModelInputs, names: Sequence[str]) -> ModelInputs:
    _check_length(len(call.args), len(names))
    return ModelInputs((), dict(zip(names, call.args, strict=True)))


def _positional(call: ModelInputs, names: Sequence[str]) -> ModelInputs:
    _check_names(set(call.kwargs), set(names))
    return ModelInputs(tuple(call.kwargs[name] for name in names), {})


def _check_count(call: ModelInputs, example: ModelInputs) -> None:
    _check_length(len(call.args), len(example.args))
    _check_names(set(call.kwargs), set(example.kwargs))


def _check_length(got: int, expected: int) -> None:
    if got == expected:
        return
    labels = (
        f" If the loader yields (inputs, labels), pass (batch[:{expected}] for batch in loader)"
        if got > expected
        else ""
    )
    raise BatchError(
        f" has {got} items, but the model takes {expected}: each "
        f"batch is a tensor, or a tuple with one item per input.{labels}",
    )


def _check_names(got: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - got):
        raise BatchError(
            f" lacks the inputs {', '.join(missing)}; it has {', '.join(sorted(got)) or 'none'}",
            input_name=missing[0],
        )
    if extra := sorted(got - expected):
        raise BatchError(
            f" has inputs that the model was not exported with: "
            f"{', '.join(extra)}. Remove them (labels are no input), or add them to the example",
            input_name=extra[0],
        )


def _structure(call: ModelInputs) -> str:
    items = [type(value).__name__ for value in call.args]
    items += [f"{name}={type(value).__name__}" for name, value in call.kwargs.items()]
    return f"({', '.join(items)})"
