"""Which part of a model is quantized by which backend."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Protocol

import torch

from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.errors import TargetError
from versatil_core.near_names import did_you_mean, near_names
from versatil_core.reference_info import TargetInfo
from versatil_passes.float_layers import FLOAT_LAYERS

OPERATORS = frozenset(FLOAT_LAYERS.values())
"""The names by which a target can ask for operators: those that an audit lists."""


@dataclass(frozen=True)
class QuantizationTarget:
    """Part of a model, and the backend that quantizes it.

    Module paths are dotted names as in ``named_modules()``. A container stands for everything
    inside. Each name between the dots may be a pattern as in :mod:`fnmatch`, such as
    ``"encoder.layers.*.mlp"``.

    Attributes:
        module_path: What is quantized; ``""`` is the whole model.
        backend: Quantizes this part; another target may have another backend.
        exclude: Module paths of what stays float inside.
        operators: Names of the operators that are quantized, as in an audit, such as
            ``("linear",)``; empty for all that the backend knows.

    Raises:
        TypeError: ``exclude`` or ``operators`` is one text instead of several.

    Example:
        >>> from versatil_core import host_backend
        >>> target = QuantizationTarget("encoder", host_backend(), exclude=["encoder.*.norm"])
        >>> target.exclude
        ('encoder.*.norm',)
    """

    module_path: str
    backend: BasePT2EBackend
    exclude: Sequence[str] = ()
    operators: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Bring lists into a form that does not change."""
        for name in ("exclude", "operators"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(f"{name} must be a list, got the text {value!r}: pass [{value!r}]")
            object.__setattr__(self, name, tuple(value))

    def selects(self, module_paths: Iterable[str], operator: str | None = None) -> bool:
        """Whether the target quantizes what belongs to some modules.

        Args:
            module_paths: A module and those around it, or only the module.
            operator: Name of the operator; None for one that isn't listed in an audit, such as
                pooling, which goes with the layers around it.
        """
        return is_selected(self, module_paths, operator)

    @property
    def is_whole_module(self) -> bool:
        """Whether it is everything inside one module, or the whole model."""
        return not (self.exclude or self.operators or is_pattern(self.module_path))


class Selection(Protocol):
    """What a target says of its part of a model, wherever that is written down."""

    @property
    def module_path(self) -> str:
        """As for :class:`QuantizationTarget`."""

    @property
    def exclude(self) -> Sequence[str]:
        """As for :class:`QuantizationTarget`."""

    @property
    def operators(self) -> Sequence[str]:
        """As for :class:`QuantizationTarget`."""


def is_selected(selection: Selection, module_paths: Iterable[str], operator: str | None) -> bool:
    """Whether what belongs to some modules is quantized: :meth:`QuantizationTarget.selects`."""
    paths = tuple(module_paths)
    return (
        (operator is None or not selection.operators or operator in selection.operators)
        and is_any_inside(paths, [selection.module_path])
        and not is_any_inside(paths, selection.exclude)
    )


Targets = BasePT2EBackend | QuantizationTarget | Sequence[QuantizationTarget]


def as_targets(backend_or_targets: Targets) -> tuple[QuantizationTarget, ...]:
    """Return targets for whatever :func:`versatil_core.quantize` accepts.

    Args:
        backend_or_targets: A backend for the whole model, one target, or several.

    Raises:
        TargetError: There is no target.
        TypeError: Something is neither a backend nor a target.
    """
    if isinstance(backend_or_targets, BasePT2EBackend):
        return (QuantizationTarget("", backend_or_targets),)
    if isinstance(backend_or_targets, QuantizationTarget):
        return (backend_or_targets,)
    targets = tuple(backend_or_targets)
    for target in targets:
        if not isinstance(target, QuantizationTarget):
            raise TypeError(f"expected a QuantizationTarget, got {target!r}")
    if not targets:
        raise TargetError(
            "the list of targets is empty, so nothing would be quantized: pass a backend for the "
            "whole model, or at least one QuantizationTarget",
            module_paths=(),
        )
    return targets


def check_targets(model: torch.nn.Module, targets: Sequence[QuantizationTarget]) -> None:
    """Check that all that targets name exists and that no two share a module.

    Args:
        model: The float model.
        targets: What is going to be quantized.

    Raises:
        TargetError: A path matches no module, an operator is unknown, or two targets overlap.
    """
    module_paths = _module_paths(model)
    for target in targets:
        inside = _matching(target.module_path, module_paths)
        for path in target.exclude:
            _matching(path, inside, f" in the target {target.module_path!r}")
        for operator in target.operators:
            _check_operator(operator)
    for first, second in combinations(targets, 2):
        _check_apart(first, second, module_paths)


def check_module_paths(model: torch.nn.Module, patterns: Iterable[str]) -> None:
    """Check that each of several module paths or patterns matches a module.

    Raises:
        TargetError: One matches none.
    """
    module_paths = _module_paths(model)
    for pattern in patterns:
        _matching(pattern, module_paths)


def is_inside(module_path: str, container: str) -> bool:
    """Whether a module is ``container`` or somewhere in it.

    Args:
        module_path: Dotted name of a module.
        container: Dotted name of another, or a pattern; ``""`` is the whole model.

    Example:
        >>> is_inside("encoder.0.linear", "encoder"), is_inside("encoder2", "encoder")
        (True, False)
        >>> is_inside("layers.3.mlp.up", "layers.*.mlp"), is_inside("layers.mlp", "layers.*.mlp")
        (True, False)
    """
    names = container.split(".") if container else []
    found = module_path.split(".") if module_path else []
    return len(found) >= len(names) and all(map(fnmatchcase, found, names))


def is_any_inside(module_paths: Iterable[str], containers: Iterable[str]) -> bool:
    """Whether one of the modules is one of the containers or somewhere in it.

    The whole model, ``""``, holds everything, also what comes from no module.
    """
    paths = tuple(module_paths)
    return any(
        not container or any(is_inside(path, container) for path in paths)
        for container in containers
    )


def is_pattern(module_path: str) -> bool:
    """Whether a path may match several modules that are not in one container."""
    return any(character in module_path for character in "*?[")


def _module_paths(model: torch.nn.Module) -> list[str]:
    return [path for path, _ in model.named_modules(remove_duplicate=False)]


def _matching(pattern: str, module_paths: Sequence[str], where: str = "") -> list[str]:
    found = [path for path in module_paths if is_inside(path, pattern)]
    if not found:
        raise _unknown_path(pattern, module_paths, where)
    return found


def _check_operator(operator: str) -> None:
    if operator in OPERATORS:
        return
    near = near_names(operator, sorted(OPERATORS))
    hint = did_you_mean(near) or "; see an audit for names"
    raise TargetError(
        f"no operator has the name {operator!r}{hint}",
        module_paths=(),
        suggestions=near,
    )


def _check_apart(
    first: QuantizationTarget, second: QuantizationTarget, module_paths: Sequence[str]
) -> None:
    if first.operators and second.operators and not {*first.operators} & {*second.operators}:
        return
    shared = [path for path in module_paths if first.selects([path]) and second.selects([path])]
    if not shared:
        return
    names = (first.module_path, second.module_path)
    whole = "" if all(names) else " (the empty path is the whole model)"
    raise TargetError(
        f"the targets {names[0]!r} and {names[1]!r} overlap{whole}: both quantize {shared[0]!r}, "
        f"and each module can be quantized by one target only; remove or narrow one, or name the "
        f"other's modules in its exclude",
        module_paths=names,
    )


def _unknown_path(module_path: str, module_paths: Sequence[str], where: str = "") -> TargetError:
    named = [path for path in module_paths if path]
    suggestions = near_names(_dotted(module_path), named, cutoff=0.5)
    top = [path for path in named if "." not in path]
    modules = f"; its modules are {', '.join(map(repr, top)) or 'none'} (see model.named_modules())"
    hint = did_you_mean(suggestions) or modules
    return TargetError(
        f"no module of the model has the path {module_path!r}{where}{hint}",
        module_paths=(module_path,),
        suggestions=suggestions,
    )


def _dotted(module_path: str) -> str:
    """Bring the ways to write a path in Python code, as in ``self.enc[0]``, near to a name."""
    plain = module_path.removeprefix("L['self']").removeprefix("self").removeprefix("model.")
    return plain.replace("[", ".").replace("]", "").strip(".")


def common_device_types(targets: Sequence[QuantizationTarget]) -> list[str]:
    """Return the types of the devices that all backends support."""
    first, *others = (target.backend.supported_device_types for target in targets)
    return [device for device in first if all(device in other for other in others)]


def target_info_of(target: QuantizationTarget) -> TargetInfo:
    """Describe a target as it is kept with a reference."""
    return TargetInfo(
        target.module_path,
        target.backend.name,
        backend_options(target.backend),
        dict(target.backend.option_reasons),
        exclude=tuple(target.exclude),
        operators=tuple(target.operators),
    )
