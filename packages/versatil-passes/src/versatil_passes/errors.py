"""The errors that every versatil package raises.

::

    VersatilError
    ├── PassError        (RuntimeError)  a graph pass failed; names the passes that ran before it
    ├── PassOrderError   (ValueError)    a chain was built in an order that its members forbid
    ├── RulesError       (ValueError)    lowering rules name something that no lowering knows
    └── UnsupportedVersionError  (ImportError)  torch lies outside the tested range

``versatil_core.errors`` continues the tree.
"""

from collections.abc import Sequence


class VersatilError(Exception):
    """Root of every error that a versatil package raises on purpose."""


class PassError(VersatilError, RuntimeError):
    """A graph pass failed.

    Attributes:
        pass_name: Name of the pass that failed.
        ran_before: Names of the passes of the same chain that had already changed the graph.
    """

    def __init__(self, pass_name: str, ran_before: Sequence[str], cause: BaseException) -> None:
        """Build the message from the failed pass, its predecessors and the cause."""
        self.pass_name = pass_name
        self.ran_before = tuple(ran_before)
        super().__init__(
            f"{pass_name} failed after [{', '.join(ran_before)}]: {type(cause).__name__}: {cause}"
        )


class PassOrderError(VersatilError, ValueError):
    """A pass stands in a chain before one that it must follow.

    Attributes:
        pass_name: Name of the pass that stands too early.
        must_follow: Name of the pass that it has to follow.
    """

    def __init__(self, pass_name: str, must_follow: str) -> None:
        """Build the message from the two names."""
        self.pass_name = pass_name
        self.must_follow = must_follow
        super().__init__(
            f"{pass_name} must run after {must_follow}: put {must_follow} first in the chain"
        )


class RulesError(VersatilError, ValueError):
    """Lowering rules name an operator, a post op or a granularity that no lowering knows.

    Attributes:
        name: The unknown name.
        known: The names that are known in its place.
    """

    def __init__(self, what: str, name: str, known: Sequence[str]) -> None:
        """Build the message from the unknown name and the known ones."""
        self.name = name
        self.known = tuple(known)
        super().__init__(f"unknown {what} {name!r} in LoweringRules: use one of {list(known)}")


class UnsupportedVersionError(VersatilError, ImportError):
    """An installed torch or torchao lies outside the tested range.

    Attributes:
        distribution: ``"torch"`` or ``"torchao"``.
        version: The installed version.
        supported: The tested range, as a version specifier.
    """

    def __init__(self, message: str, *, distribution: str, version: str, supported: str) -> None:
        """Keep what is installed and what is tested."""
        super().__init__(message)
        self.distribution = distribution
        self.version = version
        self.supported = supported
