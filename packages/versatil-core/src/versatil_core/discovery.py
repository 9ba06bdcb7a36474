"""Finds the installed backends without importing them, and loads one when it is asked for."""

import inspect
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, entry_points, version
from types import MappingProxyType
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from versatil_core.backend import BasePT2EBackend
from versatil_core.errors import (
    BackendConflictError,
    BackendLoadError,
    BackendNotFoundError,
    BackendOptionError,
)

ENTRY_POINT_GROUP = "versatil.backends"
# Only for messages: core imports none of these packages.
KNOWN_PACKAGES = MappingProxyType({"x86_inductor": "versatil-x86", "arm_inductor": "versatil-arm"})
_KNOWN_MACHINES = MappingProxyType(
    {
        "x86_64": "x86_inductor",
        "amd64": "x86_inductor",
        "aarch64": "arm_inductor",
        "arm64": "arm_inductor",
    }
)
_SIBLINGS = frozenset({"versatil-core", "versatil-passes"})


@dataclass(frozen=True)
class BackendEntry:
    """A backend as its distribution registers it, not yet imported.

    Attributes:
        name: The backend's name.
        distribution: The distribution that registers it.
        version: That distribution's version.
        object_reference: Where the class is, as ``"module:Class"``.
        entry_point: What Python knows about the registration.
    """

    name: str
    distribution: str
    version: str
    object_reference: str
    entry_point: EntryPoint = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed_backends() -> tuple[BackendEntry, ...]:
    """List the backends that installed distributions register; imports none of them.

    Returns:
        One entry per registration, sorted by name. Two with one name are both listed.
    """
    entries = [_entry(entry_point) for entry_point in entry_points(group=ENTRY_POINT_GROUP)]
    return tuple(sorted(entries, key=lambda entry: (entry.name, entry.distribution)))


def load_backend(name: str) -> type[BasePT2EBackend]:
    """Import the class of one backend.

    Args:
        name: A registered name, such as ``"x86_inductor"``.

    Returns:
        The backend's class.

    Raises:
        BackendNotFoundError: Nothing installed registers the name.
        BackendConflictError: More than one distribution registers it.
        BackendLoadError: Its package is broken, or does not go with this versatil-core.
    """
    entries = installed_backends()
    matching = [entry for entry in entries if entry.name == name]
    if not matching:
        raise _not_found(name, entries)
    if len(matching) > 1:
        parties = [str(entry) for entry in matching]
        raise BackendConflictError(
            f"the backend name {name!r} is registered by {' and by '.join(parties)}. "
            f"Uninstall all but one of them",
            name=name,
            distributions=parties,
        )
    return _load(matching[0])


def create_backend(name: str, options: Mapping[str, Any] | None = None) -> BasePT2EBackend:
    """Make a backend from its name and options, as a saved model names them.

    Args:
        name: A registered name.
        options: Constructor options, as :func:`versatil_core.backend.backend_options` returns.

    Returns:
        The backend.

    Raises:
        BackendLoadError: The installed class does not take these options, or see
            :func:`load_backend`.
    """
    backend = load_backend(name)
    try:
        return backend(**dict(options or {}))
    except TypeError as error:
        entry = next(entry for entry in installed_backends() if entry.name == name)
        raise _load_error(
            entry, f"cannot be made with the options {dict(options or {})}: {error}"
        ) from error


def host_backend(
    name: str | None = None, options: Mapping[str, Any] | None = None
) -> BasePT2EBackend:
    """Make the backend for this machine, with the options that are right on its CPU.

    Args:
        name: A registered name; whichever backend's kernels run on this machine if None.
        options: Options that the caller wants otherwise.

    Returns:
        ``for_host(**options)`` of that backend's class; of a class without that method, an instance.

    Raises:
        BackendNotFoundError: No installed and working backend serves this machine.
        BackendConflictError: Several do.
        BackendOptionError: The backend has no such option, or not that value of it.
        BackendLoadError: The backend ``name`` cannot be imported or used.
    """
    backend = _only_usable() if name is None else load_backend(name)
    for_host = getattr(backend, "for_host", backend)
    wanted = dict(options or {})
    _check_options(backend, inspect.signature(for_host).parameters, wanted)
    chosen: BasePT2EBackend = for_host(**wanted)
    return chosen


def _check_options(
    backend: type[BasePT2EBackend],
    parameters: Mapping[str, inspect.Parameter],
    options: Mapping[str, Any],
) -> None:
    # What is no option of the constructor, such as another CPU, is no option of the backend.
    known = [name for name in parameters if name in inspect.signature(backend).parameters]
    for option, value in options.items():
        if option not in known:
            remedy = f"the options are {', '.join(known) or 'none'}"
            raise BackendOptionError(backend.name, option, value, remedy)
        # The text "False", which a command line may well have, would count as true.
        if isinstance(parameters[option].default, bool) and not isinstance(value, bool):
            raise BackendOptionError(backend.name, option, value, "it is true or false")


def _only_usable() -> type[BasePT2EBackend]:
    """Find the one backend whose kernels run on this machine."""
    machine = platform.machine().lower()
    usable, problems = _usable_on(machine)
    if len(usable) > 1:
        parties = [f"{entry.name} ({entry})" for entry, _ in usable]
        raise BackendConflictError(
            f"several backends serve this machine ({machine}): {', '.join(parties)}. "
            f"Construct the one you want",
            name=machine,
            distributions=parties,
        )
    if not usable:
        installed = [entry.name for entry in installed_backends()]
        raise BackendNotFoundError(
            f"no installed backend serves this machine ({machine}); installed: "
            f"{', '.join(installed) or 'none'}.{_install_hint(_KNOWN_MACHINES.get(machine))}"
            + "".join(f"\n  {problem}" for problem in problems),
            name=None,
            installed=installed,
        )
    [(_, backend)] = usable
    return backend


def _usable_on(
    machine: str,
) -> tuple[list[tuple[BackendEntry, type[BasePT2EBackend]]], list[Exception]]:
    usable = []
    problems: list[Exception] = []
    for name in dict.fromkeys(entry.name for entry in installed_backends()):
        # A broken package must not hide a working one, so it only joins the message.
        try:
            backend = load_backend(name)
            machine_types = backend().lowering_rules.machine_types
        except (BackendLoadError, BackendConflictError) as error:
            problems.append(error)
            continue
        if machine in machine_types:
            [entry] = [entry for entry in installed_backends() if entry.name == name]
            usable.append((entry, backend))
    return usable, problems


def _entry(entry_point: EntryPoint) -> BackendEntry:
    distribution = entry_point.dist
    return BackendEntry(
        name=entry_point.name,
        distribution="unknown" if distribution is None else distribution.name,
        version="unknown" if distribution is None else distribution.version,
        object_reference=entry_point.value,
        entry_point=entry_point,
    )


def _load(entry: BackendEntry) -> type[BasePT2EBackend]:
    _check_siblings(entry)
    try:
        loaded = entry.entry_point.load()
    # Whatever a foreign package raises while it is imported must name that package.
    except Exception as error:
        raise _load_error(entry, f"cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, BasePT2EBackend)):
        raise _load_error(entry, f"registers {loaded!r}, which is no BasePT2EBackend class")
    if loaded.name != entry.name:
        raise _load_error(entry, f"registers the name {entry.name!r} for {loaded.name!r}")
    return loaded


def _check_siblings(entry: BackendEntry) -> None:
    """Refuse a package that asks for another versatil-core: pip may have been overruled."""
    for requirement in _sibling_requirements(entry.entry_point.dist):
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = "not installed"
        else:
            if requirement.specifier.contains(installed, prereleases=True):
                continue
        raise _load_error(entry, f"needs {requirement}, but that is {installed}")


def _sibling_requirements(distribution: Distribution | None) -> Iterable[Requirement]:
    if distribution is None:
        return
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # not a sibling: ours are well-formed
        if requirement.name in _SIBLINGS and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            yield requirement


def _load_error(entry: BackendEntry, reason: str) -> BackendLoadError:
    return BackendLoadError(
        f"backend {entry.name!r} of {entry} ({entry.object_reference}) {reason}. "
        f"Reinstall or upgrade it: pip install --upgrade {entry.distribution}",
        backend=entry.name,
        distribution=entry.distribution,
        version=entry.version,
    )


def _not_found(name: str, entries: Iterable[BackendEntry]) -> BackendNotFoundError:
    installed = [entry.name for entry in entries]
    return BackendNotFoundError(
        f"no installed package provides the backend {name!r}; installed: "
        f"{', '.join(installed) or 'none'}.{_install_hint(name)}",
        name=name,
        installed=installed,
    )


def _install_hint(name: str | None) -> str:
    if name is not None and name in KNOWN_PACKAGES:
        return f" Run: pip install {KNOWN_PACKAGES[name]}"
    known = ", ".join(f"{backend} (pip install {pip})" for backend, pip in KNOWN_PACKAGES.items())
    return f" Known backends: {known}"
