"""The promise that a backend sets what it needs where it is asked to, and gives it back."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from versatil_core._torch_compat import inductor_config
from versatil_core.backend import BasePT2EBackend
from versatil_core.conformance_case import ConformanceCase
from versatil_core.conformance_process import (
    ask,
    changed,
    process_state,
    put_back_afterwards,
)

_SLOT = "pre_grad_custom_pass"
_WAIT_S = 60.0  # a thread that takes longer has stopped


class EnvironmentConformance(ConformanceCase):
    """``environment_context`` and ``activate_environment``."""

    def test_context_sets_everything(self) -> None:
        """Inside, the pinned values hold, and the passes that make int8 kernels are there."""
        backend = self.make_backend()
        with put_back_afterwards():
            passes = inductor_config()[_SLOT]
            with backend.environment_context():
                missing = _not_in_force(backend)
                new_passes = inductor_config()[_SLOT]
        assert not missing, f"environment_context() does not set {', '.join(missing)}"
        assert new_passes != passes, (
            f"environment_context() puts no pass into torch._inductor.config.{_SLOT}, so "
            f"that torch.compile would make float kernels"
        )

    def test_context_restores_everything(self) -> None:
        """Afterwards all is as before: variables that were unset, and those that had a value."""
        backend = self.make_backend()
        for value in (None, "as before"):
            with put_back_afterwards():
                _set_pinned_variables(backend, value)
                before = process_state(with_patterns=False)
                with backend.environment_context():
                    pass
                found = changed(before, process_state(with_patterns=False))
            assert not found, f"environment_context() leaves changes behind: {', '.join(found)}"

    def test_context_restores_after_an_exception(self) -> None:
        """An exception inside leaves all as before, and is not swallowed."""
        with put_back_afterwards():
            before = process_state(with_patterns=False)
            is_raised = _raises_inside(self.make_backend())
            found = changed(before, process_state(with_patterns=False))
        assert is_raised, "environment_context() swallows exceptions"
        assert not found, f"after an exception, changes are left behind: {', '.join(found)}"

    def test_contexts_nest(self) -> None:
        """The end of an inner one leaves the outer one in force."""
        backend = self.make_backend()
        with put_back_afterwards():
            _set_pinned_variables(backend, None)
            before = process_state(with_patterns=False)
            with backend.environment_context():
                with backend.environment_context():
                    pass
                missing = _not_in_force(backend)
            found = changed(before, process_state(with_patterns=False))
        assert not missing, f"the end of an inner context also ends {', '.join(missing)} outside"
        assert not found, f"nested contexts leave changes behind: {', '.join(found)}"

    def test_threads_may_overlap(self) -> None:
        """The first thread to leave takes nothing from the second, and the last restores."""
        backend = self.make_backend()
        wanted = backend.inductor_settings.environment_values()
        with put_back_afterwards():
            _set_pinned_variables(backend, None)
            first, second = _Holder(backend), _Holder(backend)
            first.enter()
            second.enter()
            first.leave()
            kept = {name: os.environ.get(name) for name in wanted}
            second.leave()
            left = [name for name in wanted if name in os.environ]
        assert kept == wanted, f"once another thread leaves, the variables are {kept}, not {wanted}"
        assert not left, f"after the last thread left, these are still set: {', '.join(left)}"

    def test_activating_is_the_context_for_good(self) -> None:
        """In a new interpreter: ``activate_environment`` sets the same, and leaves it."""
        found = ask("activate", self.make_backend())
        assert not found, (
            f"environment_context() and activate_environment() differ in {', '.join(found)}"
        )


class _ExpectedError(Exception):
    """Raised on purpose."""


class _Holder:
    """A thread that stays in the context until it is told to leave."""

    def __init__(self, backend: BasePT2EBackend) -> None:
        self._backend = backend
        self._is_inside, self._may_leave = threading.Event(), threading.Event()

    def enter(self) -> None:
        """Start the thread, and wait until it is in the context."""
        self._end = ThreadPoolExecutor(max_workers=1).submit(self._hold)
        assert self._is_inside.wait(_WAIT_S), "a thread does not get into the context"

    def leave(self) -> None:
        """Let the thread leave the context, and raise what it raised."""
        self._may_leave.set()
        self._end.result(_WAIT_S)

    def _hold(self) -> None:
        with self._backend.environment_context():
            self._is_inside.set()
            self._may_leave.wait(_WAIT_S)


def _raises_inside(backend: BasePT2EBackend) -> bool:
    """Raise an exception in the context, and say whether it comes out of it."""
    try:
        with backend.environment_context():
            _raise()
    except _ExpectedError:
        return True
    return False


def _raise() -> None:
    raise _ExpectedError


def _set_pinned_variables(backend: BasePT2EBackend, value: str | None) -> None:
    """Give the variables that the backend pins another value, or none."""
    for name in backend.inductor_settings.environment_values():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _not_in_force(backend: BasePT2EBackend) -> list[str]:
    """Return the names of the pinned values that do not hold now."""
    settings, config = backend.inductor_settings, inductor_config()
    values, variables = settings.config_values(), settings.environment_values()
    names = [name for name, value in values.items() if config.get(name) != value]
    return names + [name for name, value in variables.items() if os.environ.get(name) != value]
