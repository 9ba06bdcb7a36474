"""Reads the targets of ``versatil quantize``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from versatil_core.backend import BasePT2EBackend
from versatil_core.errors import TargetError
from versatil_core.targets import QuantizationTarget, is_inside

__all__ = ["TargetOptions", "read_observers", "read_targets"]

_MODES = {"static": False, "dynamic": True}


@dataclass(frozen=True)
class TargetOptions:
    """What the command line says about targets.

    Attributes:
        targets: ``PATH``, ``PATH=static`` or ``PATH=dynamic``; empty for the whole model.
        exclude: Module paths of what stays float.
        operators: Names of the operators that are quantized; empty for all.
    """

    targets: Sequence[str] = ()
    exclude: Sequence[str] = ()
    operators: Sequence[str] = ()


def read_targets(
    model: torch.nn.Module,
    options: TargetOptions,
    make_backend: Callable[[bool | None], BasePT2EBackend],
) -> list[QuantizationTarget]:
    """Return the targets that the options stand for.

    Args:
        model: The float model.
        options: From the command line.
        make_backend: Makes the chosen backend: dynamic, static (False), or as is the default.

    Raises:
        TargetError: A mode is unknown. Paths are for `versatil_core.quantize` to check.
    """
    places = [_place(text) for text in options.targets or [""]]
    names = [path for path, _ in model.named_modules(remove_duplicate=False)]
    held = {path for path in options.exclude if any(_holds(at, path, names) for at, _ in places)}
    return [
        QuantizationTarget(
            place,
            make_backend(is_dynamic),
            # What no target holds goes to each, so that quantize() says so, with suggestions.
            [path for path in options.exclude if path not in held or _holds(place, path, names)],
            options.operators,
        )
        for place, is_dynamic in places
    ]


def read_observers(texts: Sequence[str]) -> dict[str, str]:
    """Read ``NAME`` and ``PATH=NAME`` texts into module path -> name of an observer."""
    pairs = (text.rpartition("=") for text in texts)
    return {path: name for path, _, name in pairs}


def _place(text: str) -> tuple[str, bool | None]:
    path, equals, mode = text.partition("=")
    if not equals:
        return path, None
    if mode not in _MODES:
        raise TargetError(
            f"--target {text}: {mode!r} is no way to quantize; write {path}=static or "
            f"{path}=dynamic",
            module_paths=(path,),
        )
    return path, _MODES[mode]


def _holds(place: str, path: str, names: Sequence[str]) -> bool:
    return any(is_inside(name, place) and is_inside(name, path) for name in names)
