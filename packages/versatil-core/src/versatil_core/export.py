"""Captures a float model as a graph that can be quantized."""

import copy
import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from versatil_core import _torch_compat
from versatil_core.autocast import refuse_autocast
from versatil_core.errors import ExportError, UnsupportedDeviceError
from versatil_core.linear_forms import write_as_linears
from versatil_core.reference_info import DynamicSize, InputSpec
from versatil_core.versions import check_versions

# What torch keeps while it traces a model belongs to the whole process: one thread at a time.
tracing = threading.RLock()


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of one call.

    Attributes:
        args: Positional inputs.
        kwargs: Inputs by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def leaves(self) -> list[Any]:
        """Every tensor and constant, in the order of the exported placeholders."""
        return _torch_compat.flatten_inputs(self.args, self.kwargs)


def model_inputs(inputs: Any) -> ModelInputs:
    """Read inputs in any of the forms that example inputs and batches come in.

    Args:
        inputs: A tensor is the only input; a tuple or list holds positional inputs; a mapping
            with string keys holds inputs by name.
    """
    if isinstance(inputs, ModelInputs):
        return inputs
    if isinstance(inputs, Mapping):
        return ModelInputs((), dict(inputs))
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return ModelInputs(tuple(inputs), {})
    return ModelInputs((inputs,), {})


def export(
    model: torch.nn.Module,
    example_inputs: Any,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    supported_device_types: Sequence[str] = ("cpu",),
) -> torch.fx.GraphModule:
    """Capture a model with ``torch.export``, in eval mode, without touching the model.

    Products with a weight in any form become ``aten.linear``, and weights that are computed from parameters alone,
    such as the slices of a packed attention weight, become parameters: see :mod:`versatil_core.linear_forms`.

    Args:
        model: A float model on the CPU. A copy of it is exported in eval mode.
        example_inputs: A tensor, a tuple of inputs, or a mapping of inputs by name.
        dynamic_shapes: As for ``torch.export.export``. Where it makes a dimension dynamic that
            has size 1 in the example, the example is repeated to size 2: torch would take a
            size of 1 for a constant.
        strict: As for ``torch.export.export``.
        supported_device_types: Types of the devices that tensors may be on.

    Returns:
        The exported module, which shares no tensor with ``model``.

    Raises:
        UnsupportedDeviceError: A parameter, buffer or input is on another device.
        ExportError: torch cannot capture the model; carries torch's reason.
        UnsupportedVersionError: torch and torchao are not a pair that is tested.
        AutocastError: Autocast is on.

    Example:
        >>> exported = export(torch.nn.Linear(4, 2), torch.randn(3, 4))
        >>> exported(torch.randn(3, 4)).shape
        torch.Size([3, 2])
    """
    check_versions()
    refuse_autocast("a model is captured")
    inputs = model_inputs(example_inputs)
    check_devices(model, inputs, supported_device_types)
    inputs = _widened(model, inputs, dynamic_shapes)
    private = private_copy(model)
    try:
        with tracing, torch.no_grad(), _layers_one_by_one():
            program = torch.export.export(
                private,
                inputs.args,
                dict(inputs.kwargs),
                dynamic_shapes=dynamic_shapes,
                strict=strict,
            )
            module = program.module()
    # torch.export fails with errors of many unrelated types, Dynamo's and sympy's among them.
    except Exception as error:
        raise ExportError(
            f"torch.export cannot capture {type(model).__name__} "
            f"({'strict' if strict else 'non-strict'} mode).\ntorch says: "
            f"{type(error).__name__}: {error}\n"
            f"What to do: make torch.export.export(model, example_inputs) work first; quantizing "
            f"a submodule alone, strict={not strict}, or dynamic_shapes are common ways out"
        ) from error
    assert isinstance(module, torch.fx.GraphModule)
    write_as_linears(module)
    return module


@contextmanager
def _layers_one_by_one() -> Iterator[None]:
    """Keep ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` from becoming one operator.

    In strict mode torch would capture its fast path, in which no layer can be quantized.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def check_devices(
    model: torch.nn.Module, inputs: ModelInputs, supported_device_types: Sequence[str]
) -> None:
    """Check that the model and its inputs are where the backend can run them.

    Raises:
        UnsupportedDeviceError: A tensor is on another device.
    """
    named: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    named += [(f"example input {i}", leaf) for i, leaf in enumerate(inputs.leaves)]
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and tensor.device.type not in supported_device_types:
            raise UnsupportedDeviceError(
                f"{name} is on the device {str(tensor.device)!r}, but only "
                f"{', '.join(supported_device_types)} is supported: move model and inputs there, "
                f"with .to({supported_device_types[0]!r})",
                device_type=tensor.device.type,
                supported=supported_device_types,
            )


def input_specs(module: torch.fx.GraphModule) -> tuple[InputSpec, ...]:
    """Describe the inputs of an exported module.

    Args:
        module: From :func:`export`, or anything made from it.

    Returns:
        One entry per placeholder, in order.
    """
    return tuple(_input_spec(node) for node in module.graph.nodes if node.op == "placeholder")


def _input_spec(node: torch.fx.Node) -> InputSpec:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return InputSpec(node.name, shape=None, dtype=None, value=value)
    return InputSpec(node.name, tuple(map(_size, value.shape)), str(value.dtype))


def _size(size: int | torch.SymInt) -> int | DynamicSize:
    if isinstance(size, int):
        return size
    minimum, maximum = _torch_compat.symbol_range(size)
    return DynamicSize(
        symbol=_torch_compat.symbol_name(size),
        minimum=minimum,
        maximum=maximum,
        example=_torch_compat.symbol_hint(size),
    )


def private_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model, in eval mode.

    Raises:
        ExportError: It cannot be copied.
    """
    try:
        # Exported graphs share parameters with their model, and running them for calibration
        # also writes to buffers that forward() updates.
        return copy.deepcopy(model).eval()
    except Exception as error:
        raise ExportError(
            f"{type(model).__name__} cannot be copied, and it is never changed itself.\n"
            f"copy.deepcopy says: {type(error).__name__}: {error}\n"
            f"What to do: remove what cannot be copied from the model (a lock, a file, a tensor "
            f"that is the result of a computation), or make it a fresh model in eval mode"
        ) from error


def _widened(model: torch.nn.Module, inputs: ModelInputs, dynamic_shapes: Any) -> ModelInputs:
    """Repeat example dimensions of size 1 to 2 where they are meant to be dynamic."""
    if not dynamic_shapes:
        return inputs
    names = [*inspect.signature(model.forward).parameters][: len(inputs.args)]
    if isinstance(dynamic_shapes, Mapping):
        specs = dict(dynamic_shapes)
    else:
        # As torch reads them: first the positional inputs, then those by name.
        specs = dict(zip([*names, *inputs.kwargs], dynamic_shapes, strict=False))
    args = [*inputs.args]
    for i, name in enumerate(names):
        args[i] = _widened_value(args[i], specs.get(name))
    kwargs = {name: _widened_value(value, specs.get(name)) for name, value in inputs.kwargs.items()}
    return ModelInputs(tuple(args), kwargs)


def _widened_value(value: Any, spec: Any) -> Any:
    if not spec:
        return value
    if isinstance(value, torch.Tensor):
        for dim in _dynamic_dims(spec):
            # A dimension that is not there is for torch to complain about.
            if dim < value.dim() and value.shape[dim] == 1:
                value = torch.cat([value, value], dim)
        return value
    if type(value) is dict and isinstance(spec, Mapping):
        return {name: _widened_value(item, spec.get(name)) for name, item in value.items()}
    if type(value) in {list, tuple} and isinstance(spec, (list, tuple)):
        return type(value)(
            _widened_value(item, sub) for item, sub in zip(value, spec, strict=False)
        )
    return value


def _dynamic_dims(spec: Any) -> Iterable[int]:
    dims = spec.items() if isinstance(spec, Mapping) else enumerate(spec)
    return [dim for dim, size in dims if not _is_fixed(size)]


def _is_fixed(size: Any) -> bool:
    return size is None or isinstance(size, int) or size == torch.export.Dim.STATIC
