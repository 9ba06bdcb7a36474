"""Every private torch API that this package touches.

Checked on torch 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph


def is_known(condition: Any) -> bool:
    """Whether a condition on sizes holds for every input that the graph admits; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def same_shape(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two fake tensors have equal shapes for every input, without adding a guard."""
    return first.dim() == second.dim() and all(
        is_known(a == b) for a, b in zip(first.shape, second.shape, strict=True)
    )


def size_hint(size: Any) -> int | None:
    """The size in the example that a graph was captured with; ``None`` where there is none."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return None if hint is None else int(hint)


def storage_id(value: torch.Tensor) -> int:
    """Identity of the storage behind a fake tensor: equal for a tensor and its views."""
    identity: int = value.untyped_storage()._cdata
    return identity


def pass_slot_value(graph_pass: Callable[[Graph], Any]) -> Any:
    """Wrap a pass for one of Inductor's custom pass slots.

    Inductor (2.9 to 2.15) takes a callable, and asks only subclasses of its own base class for a ``uuid``.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class InductorPass(CustomGraphPass):
        wrapped = staticmethod(graph_pass)

        def __call__(self, graph: Graph) -> None:
            graph_pass(graph)

        def uuid(self) -> Any | None:
            return uuid_of(graph_pass)

    return InductorPass()


def unwrap_pass(slot_value: Any) -> Any:
    """Inverse of :func:`pass_slot_value`; other passes come back as they are."""
    return getattr(slot_value, "wrapped", slot_value)


def uuid_of(graph_pass: Any) -> Any | None:
    """The pass's ``uuid()``, or ``None`` for a plain callable."""
    uuid = getattr(graph_pass, "uuid", None)
    return uuid() if callable(uuid) else None


def call_pass(graph_pass: Callable[..., Any], graph: Graph) -> Any:
    """Call a pass as Inductor does: some post-grad passes also want to know that this is inference."""
    import torch._inductor.custom_graph_pass as passes

    wants_inference = getattr(passes, "CustomInferenceAwareGraphPass", ())
    return (
        graph_pass(graph, is_inference=True)
        if isinstance(graph_pass, wants_inference)
        else graph_pass(graph)
    )


def inductor_value(name: str) -> Any:
    """The present value of ``torch._inductor.config``, which reads the environment when it is first imported."""
    import torch._inductor.config as config

    return getattr(config, name)


@contextlib.contextmanager
def patch_inductor_config(values: Mapping[str, Any]) -> Iterator[None]:
    """Set Inductor config values for the duration of a ``with`` block, and put back what was there.

    From torch 2.12 on the config belongs to the thread, and its own ``patch`` does this. Before, all threads share
    it and blocks may overlap, so each block is a layer: a value is that of the newest open layer, or the original.
    """
    import torch._inductor.config as config

    if _is_config_per_thread():
        with config.patch(dict(values)):
            yield
        return
    layer = _layers.push(values)
    try:
        yield
    finally:
        _layers.pop(layer)


def _is_config_per_thread() -> bool:
    import torch._inductor.config as config

    return hasattr(config, "_hash_dirty_var")


class _ConfigLayers:
    """Overlapping settings of one process-wide config."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: list[Mapping[str, Any]] = []
        self._originals: dict[str, Any] = {}

    def push(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        import torch._inductor.config as config

        layer = dict(values)
        with self._lock:
            for name in layer:
                self._originals.setdefault(name, getattr(config, name))
            self._layers.append(layer)
            self._apply(layer)
        return layer

    def pop(self, layer: Mapping[str, Any]) -> None:
        with self._lock:
            self._layers = [other for other in self._layers if other is not layer]
            self._apply(layer)
            for name in layer:
                if not any(name in other for other in self._layers):
                    del self._originals[name]

    def _apply(self, names: Mapping[str, Any]) -> None:
        import torch._inductor.config as config

        for name in names:
            settings = [layer[name] for layer in self._layers if name in layer]
            setattr(config, name, settings[-1] if settings else self._originals[name])


_layers = _ConfigLayers()
