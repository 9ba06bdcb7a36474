"""Exports a reference once more, with every size that it takes: to save it, or to compile it ahead of time."""

from typing import Any

import torch
from torch.fx import GraphModule

from versatil_core import _torch_compat
from versatil_core.export import ModelInputs, tracing
from versatil_core.reference_info import InputSpec, ReferenceInfo


def reexport(reference: GraphModule, info: ReferenceInfo) -> torch.export.ExportedProgram:
    """Export a reference, on examples made from what it says about its inputs.

    Args:
        reference: From :func:`versatil_core.quantize` or :func:`versatil_core.load`.
        info: What it says about itself.

    Returns:
        A program with the inputs, limits and equal sizes of the reference.
    """
    call = example_call(reference, info)
    # Limits and equal sizes are in the guards of the reference.
    sizes = [spec.shape and dynamic_sizes(spec) for spec in info.inputs]
    shapes = _torch_compat.dynamic_shapes_for_call(reference, sizes)
    with torch.no_grad(), tracing:
        return torch.export.export(reference, call.args, dict(call.kwargs), dynamic_shapes=shapes)


def example_call(reference: GraphModule, info: ReferenceInfo) -> ModelInputs:
    """Return inputs with which a reference can be called."""
    leaves = [*map(example, info.inputs)]
    return ModelInputs(*_torch_compat.unflatten_for_call(reference, leaves))


def example(spec: InputSpec) -> Any:
    """Return an input that fits; zeros are valid for every dtype, also as indices into an embedding."""
    value = placeholder(spec)
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def placeholder(spec: InputSpec) -> Any:
    """Return the same, of zeros that share one place in memory, whatever sizes a file may claim."""
    if spec.shape is None:
        return spec.value
    sizes = [size if isinstance(size, int) else size.example for size in spec.shape]
    return torch.zeros((), dtype=getattr(torch, str(spec.dtype).removeprefix("torch."))).expand(
        sizes
    )


def dynamic_sizes(spec: InputSpec) -> dict[int, Any]:
    """Mark the sizes of an input that may vary, as ``torch.export.export`` wants it."""
    return {
        dim: torch.export.Dim.AUTO
        for dim, size in enumerate(spec.shape or ())
        if not isinstance(size, int)
    }
