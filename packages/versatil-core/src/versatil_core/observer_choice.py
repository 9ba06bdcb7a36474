"""Which observer chooses the ranges of which layers' activations."""

from collections.abc import Mapping, Sequence

from versatil_core.errors import CalibrationError
from versatil_core.near_names import did_you_mean, near_names
from versatil_core.targets import QuantizationTarget

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
            hint = did_you_mean(near_names(str(name), OBSERVER_NAMES))
            raise CalibrationError(
                f"no observer has the name {name!r}: choose one of "
                f"{', '.join(OBSERVER_NAMES)}{hint}"
            )
    return choice


def check_fixed_ranges(choice: Mapping[str, str], targets: Sequence[QuantizationTarget]) -> None:
    """Check that some backend has fixed ranges, which an observer could choose.

    Whether a module that the choice names has any only its graph tells.

    Args:
        choice: From :func:`observer_choice`.
        targets: At least one.

    Raises:
        CalibrationError: Every backend measures its scales at each call.
    """
    if choice and all(target.backend.is_dynamic for target in targets):
        backends = ", ".join(dict.fromkeys(repr(target.backend) for target in targets))
        names = ", ".join(dict.fromkeys(choice.values()))
        raise CalibrationError(
            f"observers has {names} choose fixed ranges of activations, but no activation gets "
            f"one: {backends} measures scales at each call. Leave observers out, or use a backend "
            f"with is_dynamic=False"
        )
