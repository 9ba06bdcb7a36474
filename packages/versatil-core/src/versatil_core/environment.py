"""Environment variables that are set for a while and then are as they were."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# os.environ belongs to the whole process, and two threads may leave their scopes in any
# order. So each variable keeps the value from before the first scope and the scopes that are
# still open; the youngest open one decides, and the last to leave restores.
_lock = threading.Lock()
_before: dict[str, str | None] = {}
_open_scopes: dict[str, list[tuple[object, str]]] = {}


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside a ``with`` block.

    Variables that were unset are unset again at the end, also after an exception. Blocks may
    nest, and those of several threads may overlap in any order.

    Args:
        values: Variable -> value.

    Example:
        >>> with environment_variables({"VERSATIL_EXAMPLE": "1"}):
        ...     os.environ["VERSATIL_EXAMPLE"]
        '1'
        >>> "VERSATIL_EXAMPLE" in os.environ
        False
    """
    scope = object()
    with _lock:
        for name, value in values.items():
            if not _open_scopes.get(name):
                _before[name] = os.environ.get(name)
            _open_scopes.setdefault(name, []).append((scope, value))
            os.environ[name] = value
    try:
        yield
    finally:
        with _lock:
            for name in values:
                _close(name, scope)


def set_environment_variables(values: Mapping[str, str]) -> None:
    """Set environment variables for good, also beyond the blocks that are open now.

    Args:
        values: Variable -> value.
    """
    with _lock:
        for name, value in values.items():
            if _open_scopes.get(name):
                _before[name] = value
            os.environ[name] = value


def _close(name: str, scope: object) -> None:
    scopes = _open_scopes[name]
    scopes[:] = [entry for entry in scopes if entry[0] is not scope]
    if scopes:
        os.environ[name] = scopes[-1][1]
        return
    del _open_scopes[name]
    before = _before.pop(name)
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before
