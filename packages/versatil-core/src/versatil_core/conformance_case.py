"""What every conformance test starts from: the backend in question, and the options to try."""

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from unittest import SkipTest

from versatil_core.backend import BasePT2EBackend
from versatil_core.conformance_models import CASES

Options = Mapping[str, Any]


class ConformanceCase:
    """The backend in question; a test class of a hardware package sets these attributes.

    Attributes:
        backend_class: The class that the package registers.
        option_sets: Constructor options to try. Each has to give exact results on every CPU that
            has the kernels.
        must_run_kernels: Whether it is a failure, not a skip, where this machine has no kernels:
            for machines that are there to run these tests.
    """

    backend_class: ClassVar[type[BasePT2EBackend]]
    option_sets: ClassVar[Sequence[Options]] = ({}, {"is_dynamic": True})
    must_run_kernels: ClassVar[bool] = False

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Let pytest run a test once for each option set and each model."""
        self._check_attributes()
        if "options" in metafunc.fixturenames:
            ids = [option_text(options) for options in self.option_sets]
            metafunc.parametrize("options", self.option_sets, ids=ids)
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", CASES, ids=[case.name for case in CASES])

    def make_backend(self, options: Options | None = None) -> BasePT2EBackend:
        """Return a backend with these options, or with those of the first option set."""
        return self.backend_class(**(self.option_sets[0] if options is None else options))

    def _check_attributes(self) -> None:
        """Say what to set; without an option set, pytest would only skip."""
        backend_class, name = getattr(self, "backend_class", None), type(self).__name__
        assert isinstance(backend_class, type), (
            f"{name}.backend_class is {backend_class!r}: set it to the class that your package "
            f"registers"
        )
        assert self.option_sets, (
            f"{name}.option_sets is {self.option_sets!r}: name one set of options at least; "
            f"({{}},) is the defaults alone"
        )

    def skip_without_kernels(self) -> None:
        """Skip a test on a machine that lacks the kernels, or fail it if it must run."""
        backend, machine = self.make_backend(), platform.machine().lower()
        machine_types = backend.lowering_rules.machine_types
        if machine in machine_types:
            return
        reason = (
            f"the kernels of {backend.name!r} run on {', '.join(machine_types)}; "
            f"this machine is {machine}"
        )
        assert not self.must_run_kernels, f"{reason}, and must_run_kernels says that it has to be"
        raise SkipTest(reason)  # pytest takes it for its own


def option_text(options: Options) -> str:
    """Return options as they are written in a call; ``"default"`` for none.

    Example:
        >>> option_text({"is_dynamic": True})
        'is_dynamic=True'
    """
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "default"


def as_json(options: Options) -> str:
    """Return options as JSON text; the same for equal options."""
    return json.dumps(dict(options), sort_keys=True)
