"""Which observer chooses the ranges of which layers' activations."""

import difflib
from collections.abc import Mapping

from versatil_core.errors import CalibrationError

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
