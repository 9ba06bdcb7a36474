"""The tree in the module's docstring is the tree."""

import inspect
import re

import pytest

from versatil_core import errors


def own_errors() -> list[type[Exception]]:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    return [
        value
        for value in classes
        if value.__module__ == errors.__name__ and issubclass(value, Exception)
    ]


def test_the_docstring_draws_the_tree() -> None:
    drawn = dict(re.findall(r"── (\w+)\s+(?:\((\w+)\))?", errors.__doc__ or ""))

    assert set(drawn) == {error.__name__ for error in own_errors()}
    for error in own_errors():
        assert issubclass(error, errors.VersatilError)

        bases = [base.__name__ for base in error.__bases__ if base is not errors.VersatilError]
        assert drawn[error.__name__] == (bases[0] if bases else "")


def test_all_is_complete() -> None:
    from_passes = {"VersatilError", "UnsupportedVersionError"}
    assert set(errors.__all__) == {error.__name__ for error in own_errors()} | from_passes


@pytest.mark.parametrize("error", own_errors())
def test_attributes_are_documented(error: type[Exception]) -> None:
    # Those without an __init__ of their own have no attributes.
    for name in inspect.signature(error.__init__).parameters:
        if name not in {"self", "message", "args", "kwargs"}:
            assert f"{name}:" in (error.__doc__ or ""), name


def test_attributes_are_kept() -> None:
    error = errors.CalibrationError("bad", batch_index=3, input_name="x")

    assert (error.batch_index, error.input_name, str(error)) == (3, "x", "bad")


def test_an_option_error_says_what_was_asked_for_and_what_to_do() -> None:
    error = errors.BackendOptionError("mine", "colour", "red", "choose blue")

    assert str(error) == "backend 'mine': colour='red' is not possible: choose blue"
    assert (error.backend, error.option, error.value) == ("mine", "colour", "red")
    assert error.remedy == "choose blue"
