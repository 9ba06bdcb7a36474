"""The values that the backend's options can have."""

from typing import Literal, get_args

from versatil_core.errors import BackendOptionError

BACKEND_NAME = "arm_inductor"
ActivationDtype = Literal["int8", "uint8"]


def check_activation_dtype(value: str) -> ActivationDtype:
    """Return the value if it is one.

    Raises:
        BackendOptionError: It is not.
    """
    for known in get_args(ActivationDtype):
        if value == known:
            return known
    known_values = ", ".join(get_args(ActivationDtype))
    raise BackendOptionError(
        BACKEND_NAME, "activation_dtype", value, f"choose one of {known_values}"
    )


def check_columns_bytes_max(value: int) -> int:
    """Return the value if it is a size in bytes.

    Raises:
        BackendOptionError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BackendOptionError(
            BACKEND_NAME, "columns_bytes_max", value, "give a number of bytes, 0 or more"
        )
    return value
