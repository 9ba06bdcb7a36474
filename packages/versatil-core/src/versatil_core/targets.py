"""Which part of a model is quantized by which backend."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from versatil_core.backend import BasePT2EBackend
from versatil_core.errors import TargetError


@dataclass(frozen=True)
class QuantizationTarget:
    """One submodule, with everything inside it, and the backend that quantizes it.

    Attributes:
        module_path: Dotted name as in ``named_modules()``, such as ``"encoder.0"``; a container
            stands for everything inside; ``""`` is the whole model.
        backend: Quantizes this part; another target may have another backend.
    """

    module_path: str
    backend: BasePT2EBackend


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
    """Check that every target exists and that no two share a module.

    Args:
        model: The float model.
        targets: What is going to be quantized.

    Raises:
        TargetError: A path matches no module, or two targets overlap.
    """
    module_paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for target in targets:
        if target.module_path not in module_paths:
            raise _unknown_path(target.module_path, module_paths)
    for first, second in combinations([target.module_path for target in targets], 2):
        if is_inside(first, second) or is_inside(second, first):
            raise TargetError(
                f"the targets {first!r} and {second!r} overlap"
                f"{'' if first and second else ' (the empty path is the whole model)'}: "
                f"each module can be quantized by one target only, so remove or narrow one",
                module_paths=(first, second),
            )


def is_inside(module_path: str, container: str) -> bool:
    """Whether a module is ``container`` or somewhere in it.

    Example:
        >>> is_inside("encoder.0.linear", "encoder"), is_inside("encoder2", "encoder")
        (True, False)
    """
    return not container or module_path == container or module_path.startswith(container + ".")


def _unknown_path(module_path: str, module_paths: Sequence[str]) -> TargetError:
    named = [path for path in module_paths if path]
    suggestions = difflib.get_close_matches(_dotted(module_path), named, n=3, cutoff=0.5)
    if suggestions:
        hint = f"did you mean {' or '.join(map(repr, suggestions))}?"
    else:
        top = [path for path in named if "." not in path]
        hint = f"its modules are {', '.join(map(repr, top)) or 'none'} (see model.named_modules())"
    return TargetError(
        f"no module of the model has the path {module_path!r}; {hint}",
        module_paths=(module_path,),
        suggestions=suggestions,
    )


def _dotted(module_path: str) -> str:
    """Bring the ways to write a path in Python code, as in ``self.enc[0]``, near to a name."""
    plain = module_path.removeprefix("L['self']").removeprefix("self").removeprefix("model.")
    return plain.replace("[", ".").replace("]", "").strip(".")
