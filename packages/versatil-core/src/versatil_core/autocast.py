"""What ``torch.autocast`` means for an int8 model.

It decides by the call which operators compute in bfloat16, and its choices are not in the graph that defines the
results. Around :func:`versatil_core.compile`, ``lower`` and ``package`` it is taken for the option
``float_dtype="bfloat16"``; where it could only be followed in another way, or not at all, it is refused.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from versatil_core.errors import AutocastError


def autocast_wants_bfloat16() -> bool:
    """Whether autocast is on, and asks for bfloat16.

    Raises:
        AutocastError: It asks for another dtype.
    """
    autocast = _autocast_dtype()
    if autocast not in {None, torch.bfloat16}:
        raise AutocastError(
            f"autocast asks for {autocast}, and float parts can be float32 or bfloat16: use "
            "torch.autocast('cpu', torch.bfloat16), or none"
        )
    return autocast is torch.bfloat16


def refuse_autocast(what: str) -> None:
    """Raise if autocast is on.

    Args:
        what: What the caller is about to do.

    Raises:
        AutocastError: It is.
    """
    autocast = _autocast_dtype()
    if autocast is not None:
        raise AutocastError(
            f"torch.autocast('cpu', {autocast}) is on while {what}. Which layers it changes would depend on the "
            f"call, so it is refused. For float parts in bfloat16, give the backend the option "
            "float_dtype='bfloat16' when quantizing; to leave them as they are, put "
            "torch.autocast('cpu', enabled=False) around this"
        )


def autocast_at_call(*, is_bfloat16: bool) -> AbstractContextManager[Any]:
    """The context in which a compiled model runs: without autocast.

    Args:
        is_bfloat16: Whether the model's float parts are bfloat16.

    Raises:
        AutocastError: Autocast asks for something that the model does not do.
    """
    autocast = _autocast_dtype()
    if autocast is None:
        return nullcontext()
    if autocast is torch.bfloat16 and is_bfloat16:
        return torch.autocast("cpu", enabled=False)
    refuse_autocast("a compiled model is called whose float parts are not in that dtype")
    raise AssertionError


def _autocast_dtype() -> torch.dtype | None:
    """The dtype that autocast asks for on the CPU; ``None`` where it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
