import pytest

import versatil_passes
from versatil_passes import PassError, PassOrderError, VersatilError, errors


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = {
        line.split()[1]: line.split("(", 1)[1].split(")")[0]
        for line in (errors.__doc__ or "").splitlines()
        if "──" in line
    }
    made = {
        name: next(base.__name__ for base in error.__bases__ if base is not VersatilError)
        for name, error in vars(errors).items()
        if isinstance(error, type)
        and issubclass(error, VersatilError)
        and error is not VersatilError
    }
    assert drawn == made


def test_a_failed_pass_is_a_runtime_error_with_attributes() -> None:
    error = PassError("Second", ["First"], KeyError("linear_3"))
    assert isinstance(error, (VersatilError, RuntimeError))
    assert (error.pass_name, error.ran_before) == ("Second", ("First",))
    assert str(error) == "Second failed after [First]: KeyError: 'linear_3'"


def test_a_wrong_order_is_a_value_error_that_says_what_to_do() -> None:
    error = PassOrderError("Second", "First")
    assert isinstance(error, VersatilError)
    assert isinstance(error, ValueError)
    assert (error.pass_name, error.must_follow) == ("Second", "First")
    assert str(error) == "Second must run after First: put First first in the chain"


@pytest.mark.parametrize("name", ["PassError", "PassOrderError", "VersatilError"])
def test_errors_are_public(name: str) -> None:
    assert name in versatil_passes.__all__
