"""What a name that nothing has may have been meant to be."""

import difflib
from collections.abc import Iterable, Sequence


def near_names(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Find names that look like another, at most three, the most alike first.

    Args:
        name: Perhaps with a typing error.
        names: What there is.
        cutoff: From 0, everything is near, to 1, only the name itself is.
    """
    return difflib.get_close_matches(name, [*names], n=3, cutoff=cutoff)


def did_you_mean(near: Sequence[str]) -> str:
    """Word the question as the end of an error's message; ``""`` without names."""
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
