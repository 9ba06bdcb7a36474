"""Which observer chooses the ranges of which layers' activations."""

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from versatil_core.errors import CalibrationError
from versatil_core.targets import check_pattern

OBSERVER_NAMES = ("min_max", "moving_average", "percentile", "mse", "entropy", "histogram")
"""The observers that can be asked for; see :mod:`versatil_core.activation_observers`."""

Observers = str | Mapping[str, str] | None


def observer_choice(observers: Observers) -> dict[str, str]:
    """Return a pattern of module paths for each observer asked for.

    Args:
        observers: A name for the whole model, or names by module path.

    Raises:
        CalibrationError: No observer has such a name.
    """
    choice = {"": observers} if isinstance(observers, str) else dict(observers or {})
    for name in choice.values():
        if name not in OBSERVER_NAMES:
            near = difflib.get_close_matches(str(name), OBSERVER_NAMES, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise CalibrationError(
                f"no observer has the name {name!r}{hint}: choose one of "
                f"{', '.join(OBSERVER_NAMES)}"
            )
    return choice


def check_observer_paths(model: torch.nn.Module, choice: Mapping[str, str]) -> None:
    """Check that each pattern matches a module.

    Raises:
        TargetError: One does not.
    """
    for pattern in choice:
        check_pattern(model, pattern)


def has_fixed_range(spec: Any) -> bool:
    """Whether a quantization spec of an activation is one whose range an observer chooses."""
    from torchao.quantization.pt2e.quantizer import QuantizationSpec

    return isinstance(spec, QuantizationSpec) and not spec.is_dynamic
