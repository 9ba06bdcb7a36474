"""Finds the layers that stay float without being allowed to."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from versatil_core.audit import LayerAudit
from versatil_core.errors import TargetError
from versatil_core.layer_report import LayerReport
from versatil_core.near_names import did_you_mean, near_names
from versatil_core.targets import is_inside

Layer = TypeVar("Layer", LayerAudit, LayerReport)


def float_layers_outside(layers: Sequence[Layer], excluded: Iterable[str]) -> tuple[Layer, ...]:
    """Find the layers that stay float without being excluded.

    Args:
        layers: Of an audit or a report.
        excluded: Module paths or patterns; each also excludes all modules inside.

    Returns:
        Those layers, in the order in which they run.

    Raises:
        TargetError: An excluded path matches no layer: most likely a typing error.
    """
    paths = [layer.module_path or layer.node for layer in layers]
    for path in (excluded := tuple(excluded)):
        if not any(is_inside(layer, path) for layer in paths):
            near = near_names(path, _with_parents(paths))
            raise TargetError(
                f"--exclude {path}: no layer has this path{did_you_mean(near)}",
                module_paths=(path,),
                suggestions=near,
            )
    return tuple(
        layer
        for layer, name in zip(layers, paths, strict=True)
        if not layer.is_int8 and not any(is_inside(name, path) for path in excluded)
    )


def _with_parents(paths: Iterable[str]) -> list[str]:
    parts = [path.split(".") for path in paths]
    every = (".".join(names[:end]) for names in parts for end in range(1, len(names) + 1))
    return list(dict.fromkeys(every))
