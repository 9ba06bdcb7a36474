"""In which dtype the float parts of an int8 model compute, and who may say so.

It is decided once, and written into the graph of the reference: by the backend's option ``float_dtype``, by
the weights of the model, or by :func:`with_float_dtype`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch.fx import GraphModule, Interpreter, Node

from versatil_core import _torch_compat
from versatil_core.autocast import autocast_wants_bfloat16
from versatil_core.backend import BasePT2EBackend
from versatil_core.errors import BackendOptionError, LoweringError, TargetError
from versatil_core.export import input_specs, tracing
from versatil_core.kept_buffers import KeptBuffers
from versatil_core.reexport import example
from versatil_core.reference_info import attach_reference_info, find_reference_info
from versatil_core.targets import QuantizationTarget
from versatil_passes.bfloat16_casts import compute_in_float32, dtype_of
from versatil_passes.bfloat16_floats import Bfloat16Floats

FloatDtype = Literal["float32", "bfloat16"]
_WANTED = "versatil_float_dtype"
_OPTION = "float_dtype"


def check_float_dtype(backend: str, value: str | torch.dtype) -> FloatDtype:
    """Return the name of the dtype.

    Args:
        backend: Name of the backend that has the option.
        value: ``"float32"`` or ``"bfloat16"``, or the dtype itself.

    Raises:
        BackendOptionError: It is another one.
    """
    name = str(value).removeprefix("torch.")
    for known in get_args(FloatDtype):
        if name == known:
            return known
    remedy = "choose float32 or bfloat16"
    if name == "float16":
        remedy += "; float16 is not supported, since most CPUs cannot compute in it"
    raise BackendOptionError(backend, _OPTION, value, remedy)


def with_float_dtype(reference: GraphModule, float_dtype: str | torch.dtype) -> GraphModule:
    """Return a reference whose float parts compute in another dtype.

    Args:
        reference: What :func:`versatil_core.quantize` or :func:`versatil_core.load` returned. It is not
            changed.
        float_dtype: ``"bfloat16"``; or ``"float32"``, for which the reference itself is returned if nothing in it
            is bfloat16.

    Returns:
        The same as :func:`versatil_core.quantize` makes for a backend with this option.

    Raises:
        BackendOptionError: The dtype is neither of the two.
        LoweringError: The reference is bfloat16 already and float32 is wanted: what was rounded is lost.

    Example:
        >>> from versatil_core import host_backend, quantize
        >>> model, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
        >>> reference = quantize(model, x, host_backend(), calibration=[x])
        >>> with_float_dtype(reference, "bfloat16")(x).dtype
        torch.bfloat16
    """
    wanted = check_float_dtype("of this reference", float_dtype)
    if wanted == "float32":
        if has_bfloat16(reference):
            raise LoweringError(
                "the float parts of this reference are bfloat16, and what was rounded is lost: quantize the float "
                "model again, with float_dtype='float32'"
            )
        return reference
    converted = _torch_compat.copy_graph_module(reference)
    _to_bfloat16(converted)
    info = find_reference_info(reference)
    if info is not None:
        targets = tuple(
            replace(target, options={**target.options, _OPTION: wanted})
            if _OPTION in target.options
            else target
            for target in info.targets
        )
        attach_reference_info(converted, replace(info, targets=targets))
    return converted


def as_compiled(reference: GraphModule, backend: BasePT2EBackend) -> GraphModule:
    """Return the reference as ``backend`` compiles it: in bfloat16, where its option or autocast asks for that.

    Raises:
        AutocastError: Autocast asks for another dtype than bfloat16.
    """
    is_wanted = autocast_wants_bfloat16() or backend.float_dtype == "bfloat16"
    if not is_wanted or not isinstance(reference, GraphModule) or _is_converted(reference):
        return reference
    return with_float_dtype(reference, "bfloat16")


def common_float_dtype(targets: Sequence[QuantizationTarget]) -> FloatDtype:
    """Return the dtype that all targets ask for.

    Raises:
        TargetError: They ask for different ones.
    """
    wanted = {target.backend.float_dtype: target.module_path for target in targets}
    if len(wanted) > 1:
        asked = ", ".join(f"{path!r} for {dtype}" for dtype, path in sorted(wanted.items()))
        raise TargetError(
            f"targets ask for different float_dtype: {asked}; float parts are between targets, too, so that it is one "
            "for the whole model",
            module_paths=tuple(wanted.values()),
        )
    return check_float_dtype(targets[0].backend.name, next(iter(wanted)))


def ask_for_float_dtype(prepared: GraphModule, float_dtype: str) -> None:
    """Note in a prepared module what its reference is going to be."""
    prepared.meta[_WANTED] = float_dtype


def settle_float_dtype(reference: GraphModule) -> None:
    """Bring a converted module, in place, to the dtype that was asked for when it was prepared.

    A model with bfloat16 weights becomes a reference whose int8 layers round once, as the kernels do.
    """
    if reference.meta.pop(_WANTED, "float32") == "bfloat16":
        _to_bfloat16(reference)
    else:
        with tracing:
            Bfloat16Floats(only_layers=True)(reference.graph)
        reference.recompile()


def has_bfloat16(reference: GraphModule) -> bool:
    """Whether any value of a reference is bfloat16."""
    return any(dtype_of(node) is torch.bfloat16 for node in reference.graph.nodes)


def _is_converted(reference: GraphModule) -> bool:
    info = find_reference_info(reference)
    return info is not None and all(
        target.options.get(_OPTION) == "bfloat16" for target in info.targets
    )


def _to_bfloat16(reference: GraphModule) -> None:
    with tracing:
        Bfloat16Floats()(reference.graph)
    reference.recompile()
    state = KeptBuffers(reference)
    for node in _without_bfloat16_kernel(reference):
        compute_in_float32(node)
    state.restore()
    reference.recompile()


def _without_bfloat16_kernel(reference: GraphModule) -> list[Node]:
    """Find the ops that torch cannot compute in bfloat16, by running all once."""
    finder = _MissingKernels(reference)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        finder.run(*[example(spec) for spec in input_specs(reference)])
    return finder.found


class _MissingKernels(Interpreter):
    """Runs a reference, and computes in float32 where there is no bfloat16 kernel."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: list[Node] = []

    def run_node(self, n: Node) -> Any:
        try:
            return super().run_node(n)
        except (RuntimeError, NotImplementedError):
            if not any(dtype_of(arg) is torch.bfloat16 for arg in n.all_input_nodes):
                raise
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            result = getattr(self, n.op)(n.target, *_in(torch.float32, (args, kwargs)))
            self.found.append(n)
            return _in(torch.bfloat16, result)


def _in(dtype: torch.dtype, tree: Any) -> Any:
    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.dtype in {
            torch.float32,
            torch.bfloat16,
        }
        return value.to(dtype) if is_float else value

    return _torch_compat.tree_map(cast, tree)
