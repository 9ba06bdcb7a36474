"""Compile a reference to int8 kernels with Inductor, without touching anything global."""

import itertools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule

from versatil_core import _torch_compat
from versatil_core.autocast import autocast_at_call, refuse_autocast
from versatil_core.backend import BasePT2EBackend
from versatil_core.errors import InputError, LoweringError
from versatil_core.export import input_specs
from versatil_core.float_dtype import as_compiled, has_bfloat16
from versatil_core.input_check import input_faults
from versatil_core.lower import check_host, lower, lowered_copy, passes_in_front
from versatil_core.saturation import SaturationCheck, warn_about_saturation
from versatil_core.versions import check_versions
from versatil_passes import (
    DecomposeQuantization,
    Int8Lowering,
    KeepTransposedConvolutions,
    pass_slots,
)
from versatil_passes.pass_chain import GraphPass

_log = logging.getLogger(__name__)
_model_numbers = itertools.count()
# How often a call waits for other threads that compile; each compiles a few sizes at most.
_TRIES = 50


class CompiledModel(torch.nn.Module):
    """A reference that runs as int8 kernels, compiled at its first call and again whenever Dynamo asks for it.

    Every compilation, whatever triggers it, goes through the backend. Should Dynamo stop compiling (too many
    different input shapes, ``TORCHDYNAMO_DISABLE=1``), the lowered graph runs instead: slower, still int8, and said
    in the log. Gradients are off inside. Input tensors are never written to.

    ``copy.deepcopy`` gives a model that compiles anew at its first call. ``train()`` and ``eval()`` change nothing: the
    model was captured in eval mode. Any thread may call it.

    Attributes:
        reference: The quantize/dequantize graph that defines the results.
        backend: The backend that compiles it.
    """

    def __init__(
        self, reference: GraphModule, backend: BasePT2EBackend, *, dynamic: bool | None
    ) -> None:
        """Prepare; nothing is compiled yet."""
        super().__init__()
        self.reference = reference
        self.backend = backend
        self._dynamic = dynamic
        self._lowered: GraphModule | None = None
        self._is_bfloat16 = has_bfloat16(reference)
        self._run = torch.compile(
            own_code(self._traced), backend=dynamo_backend(backend), dynamic=dynamic
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; the first call compiles.

        Raises:
            InputError: An input does not fit what the model was exported with.
            AutocastError: Autocast is on, and the model's float parts are not in its dtype.
        """
        with autocast_at_call(is_bfloat16=self._is_bfloat16):
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(type(value).__module__ == "numpy" for value in (*args, *kwargs.values())):
            # Dynamo would trace NumPy, fail, and leave the exported checks of the inputs broken.
            error = TypeError("a NumPy array is no input of a compiled model")
            _explain_inputs(self.reference, args, kwargs, error)
        for _ in range(_TRIES):
            try:
                with torch.no_grad():
                    return self._run(self, *args, **kwargs)
            except Exception as error:
                if not _torch_compat.is_traced_elsewhere(error):
                    _explain_inputs(self.reference, args, kwargs, error)
                    raise
            with _torch_compat.compile_lock():
                continue  # after the thread that compiles right now
        with torch.no_grad():
            return self._run(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledModel":
        reference = _torch_compat.copy_graph_module(self.reference)
        _torch_compat.clone_tensors(reference)
        copied = CompiledModel(reference, self.backend, dynamic=self._dynamic)
        copied.train(self.training)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> NoReturn:
        raise LoweringError(
            "a compiled model is native code of this process, which cannot be pickled: save() its reference, then "
            "load() and compile() it where it is needed, or package() it once and load_package() it there"
        )

    @staticmethod
    def _traced(model: "CompiledModel", *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return model.reference(*args, **kwargs)
        return model.run_lowered(*args, **kwargs)

    def run_lowered(self, *args: Any, **kwargs: Any) -> Any:
        """Run the lowered graph, as :func:`versatil_core.lower` makes it, without compiling."""
        if self._lowered is None:
            _log.warning(
                "Dynamo does not compile this call: running the lowered graph, slower int8"
            )
            self._lowered = lower(self.reference, self.backend)
        return self._lowered(*args, **kwargs)


def _explain_inputs(
    reference: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> None:
    """Raise an :class:`InputError` if the inputs explain ``error``; only then are they checked."""
    ordered = _torch_compat.in_call_order(reference, kwargs)
    specs, leaves = input_specs(reference), _torch_compat.flatten_inputs(args, ordered)
    if len(specs) != len(leaves):
        names = ", ".join(spec.name for spec in specs)
        raise InputError(
            f"the model takes {len(specs)} inputs ({names}), got {len(leaves)}"
        ) from error
    for fault in input_faults(specs, leaves):
        raise InputError(str(fault), input_name=fault.input_name) from error


def compile(  # noqa: A001 - the verb of the field; torch.compile shadows the builtin too
    reference: GraphModule, backend: BasePT2EBackend, *, dynamic: bool | None = None
) -> CompiledModel:
    """Compile a reference to int8 kernels.

    Nothing global changes: Inductor's config, the environment and its pattern tables are as before, also after an
    exception, and other threads may compile with other backends meanwhile. The user's own pre-grad passes run first.

    Args:
        reference: What :func:`versatil_core.quantize` or :func:`versatil_core.load` returned.
        backend: The hardware to compile for.
        dynamic: Whether sizes stay symbolic in the kernels. ``None`` takes it from the reference: yes, where it was
            quantized with ``dynamic_shapes``.

    Returns:
        A module ready to serve. Its first call compiles.

    Raises:
        UnsupportedHostError: This machine does not have the backend's kernels.
        LoweringError: ``reference`` is no graph module, or is lowered already.
        AutocastError: Autocast is on, with another dtype than bfloat16.
    """
    check_versions()
    check_host(backend)
    reference = as_compiled(reference, backend)
    _, record = lowered_copy(reference, backend.lowering_rules)
    warn_about_saturation(record, backend.lowering_rules)
    is_dynamic = _has_symbolic_inputs(reference) if dynamic is None else dynamic
    return CompiledModel(reference, backend, dynamic=is_dynamic)


def inductor_values(backend: BasePT2EBackend) -> dict[str, Any]:
    """What to set in Inductor's config for ``backend``: its pinned settings, and its passes behind the user's own."""
    check_versions()
    lowering = Int8Lowering(backend.lowering_rules)
    passes: tuple[GraphPass, ...] = (
        *passes_in_front(backend.lowering_rules),
        lowering,
        SaturationCheck(lowering),
        DecomposeQuantization(),
        KeepTransposedConvolutions(),
    )
    return {**backend.inductor_settings.config_values(), **pass_slots(*passes)}


def dynamo_backend(backend: BasePT2EBackend) -> Callable[..., Callable[..., Any]]:
    """A Dynamo backend, for ``torch.compile(module, backend=...)``, that compiles with ``backend``.

    Parameters and buffers become constants of the graph, since only constants can be packed. (Inductor's own freezing
    is decided by Dynamo while it traces, from a global setting; this is not.)

    Args:
        backend: The hardware to compile for.

    Returns:
        A function of Dynamo's graph and its example inputs that returns the compiled function.
    """

    def compile_graph(module: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        check_host(backend)
        refuse_autocast("torch.compile compiles a reference")
        with torch.no_grad(), backend.environment_context():
            frozen, kept = _with_constants(module, inputs)
            kept_inputs = [inputs[index] for index in kept]
            compiled = _torch_compat.compile_with_inductor(frozen, kept_inputs)
        if len(kept) == len(inputs):
            return compiled
        return lambda *args: compiled(*[args[index] for index in kept])

    return compile_graph


def _with_constants(module: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, list[int]]:
    """A copy of ``module`` in which static inputs are buffers, and the positions of the inputs that remain."""
    # A copy, since Dynamo reads the placeholders of its own graph afterwards.
    frozen = _torch_compat.copy_graph_module(module)
    kept = []
    placeholders = frozen.graph.find_nodes(op="placeholder")
    for index, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        if not _torch_compat.is_static_input(value):
            kept.append(index)
            continue
        name = f"_constant_{index}"
        frozen.register_buffer(name, value.detach())
        with frozen.graph.inserting_before(node):
            constant = frozen.graph.get_attr(name)
        constant.meta = (
            {"example_value": node.meta["example_value"]} if "example_value" in node.meta else {}
        )
        node.replace_all_uses_with(constant)
        frozen.graph.erase_node(node)
    frozen.recompile()
    _torch_compat.forget_dynamo_inputs(frozen)
    return frozen, kept


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``function`` with a code object of its own.

    Dynamo counts recompilations by code object: models that share one would share its limit.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"versatil_model_{next(_model_numbers)}")
    return types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )


def _has_symbolic_inputs(reference: GraphModule) -> bool:
    values = [node.meta.get("val") for node in reference.graph.find_nodes(op="placeholder")]
    return any(
        isinstance(size, torch.SymInt) for value in values for size in getattr(value, "shape", ())
    )
