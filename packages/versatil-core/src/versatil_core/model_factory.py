"""Load what the command is given: a model factory or an exported program, and batches.

Read here, and only here, is what ``versatil quantize`` names on its command line. Each
fault is a `ModelSourceError` that quotes what was given.
"""

import importlib
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from versatil_core.errors import ModelFileError
from versatil_core.manifest import read_manifest
from versatil_core.near_names import did_you_mean, near_names
from versatil_passes.errors import VersatilError

__all__ = [
    "ModelSource",
    "ModelSourceError",
    "load_batches",
    "load_metric",
    "load_model_source",
]

Batch = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]


class ModelSourceError(VersatilError, ValueError):
    """What the command was given as a model or as calibration data can't be used.

    Attributes:
        source: The text or path as it was given.
    """

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")
        self.source = source


@dataclass(frozen=True)
class ModelSource:
    """A float model with what its author said about its inputs.

    Attributes:
        model: Ready to export.
        example_inputs: One batch, a tuple or by name; None if only a model was returned.
        calibration: Batches the factory returned, or None.
        dynamic_shapes: For an exported program with dynamic sizes: for each input the
            dimensions that stay dynamic. None if every size is fixed.
    """

    model: nn.Module
    example_inputs: Batch | None = None
    calibration: tuple[Batch, ...] | None = None
    dynamic_shapes: tuple[dict[int, Any], ...] | None = None


def load_model_source(source: str) -> ModelSource:
    """Load ``pkg.module:factory`` or an exported program.

    Args:
        source: A path that ends in ``.pt2``, written by ``torch.export.save``; or the
            module and the name of a callable in it, separated by a colon. Modules in
            the working directory are found. The callable returns a model, or
            ``(model, example_inputs)``, or ``(model, example_inputs, calibration)``.

    Returns:
        The model and what came with it.

    Raises:
        ModelSourceError: Nothing usable is there.
    """
    if source.endswith(".pt2") or Path(source).is_file():
        return _load_program(Path(source))
    module_name, colon, attribute = source.partition(":")
    if not (colon and module_name and attribute):
        raise ModelSourceError(
            source,
            "neither a .pt2 file nor a factory. "
            "Name a factory like `package.module:function`, or a file that "
            "`torch.export.save` wrote",
        )
    with _working_directory_importable():
        return _call_factory(source, _find_factory(source, module_name, attribute))


def load_metric(source: str) -> Callable[..., Any]:
    """Load the metric ``pkg.module:function``.

    Raises:
        ModelSourceError: Nothing callable is there.
    """
    module_name, colon, attribute = source.partition(":")
    if not (colon and module_name and attribute):
        raise ModelSourceError(source, "no metric: name a function like `package.module:function`")
    with _working_directory_importable():
        return _find(source, module_name, attribute, "a metric")


def load_batches(path: Path, example_inputs: Batch | None) -> tuple[Batch, ...]:
    """Load batches of inputs from a file.

    Args:
        path: A ``.pt`` file holds a list with one tuple of tensors for each batch (or
            one tensor, for a model with one input; or one dictionary, for inputs by name).
            A ``.npz`` file holds one array for each model input, in order, with the samples
            along the first axis; it is cut into batches of the example's size, and samples
            that don't fill one are left out. If the example inputs are a dictionary, the
            arrays have its names.
        example_inputs: One batch; a ``.npz`` can't be cut without it.

    Returns:
        The batches, in the form of the example inputs.

    Raises:
        ModelSourceError: The file isn't there, isn't of that kind, or doesn't fit the
            example inputs.
    """
    if not path.is_file():
        raise ModelSourceError(str(path), "no such file")
    if path.suffix == ".npz":
        return _load_npz(path, example_inputs)
    if path.suffix == ".pt":
        return _load_pt(path)
    raise ModelSourceError(
        str(path), "data must be a .npz or a .pt file; see `versatil quantize --help`"
    )


def _load_program(path: Path) -> ModelSource:
    if not path.is_file():
        raise ModelSourceError(str(path), "no such model file")
    if _is_quantized(path):
        raise ModelSourceError(
            str(path), "is quantized already; `versatil inspect` shows what is in it"
        )
    try:
        program = torch.export.load(path)
    except Exception as error:  # torch raises whatever the broken part of the file caused
        raise ModelSourceError(
            str(path),
            f"not a program that `torch.export.save` wrote ({type(error).__name__}: "
            f"{_first_line(error)})",
        ) from error
    args, kwargs = program.example_inputs or ((), {})
    if kwargs:
        raise ModelSourceError(
            str(path),
            f"the program takes keyword inputs ({', '.join(kwargs)}); export it with "
            "positional inputs only",
        )
    return ModelSource(
        program.module(),
        example_inputs=_as_batch(str(path), "its example inputs", args) if args else None,
        dynamic_shapes=_dynamic_shapes(program),
    )


def _is_quantized(path: Path) -> bool:
    try:
        read_manifest(path)
    except ModelFileError:
        return False
    return True


def _dynamic_shapes(program: torch.export.ExportedProgram) -> tuple[dict[int, Any], ...] | None:
    """Say for each input which dimensions were exported as dynamic."""
    names = set(program.graph_signature.user_inputs)
    shapes = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names
    ]
    dynamic = tuple(
        {
            axis: torch.export.Dim.AUTO
            for axis, size in enumerate(shape)
            if isinstance(size, torch.SymInt)
        }
        for shape in shapes
    )
    return dynamic if any(dynamic) else None


def _find_factory(source: str, module_name: str, attribute: str) -> Callable[[], object]:
    found = _find(source, module_name, attribute, "a function that returns a model")
    return (lambda: found) if isinstance(found, nn.Module) else found


def _find(source: str, module_name: str, attribute: str, wanted: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise ModelSourceError(
            source,
            f"importing {module_name} failed ({type(error).__name__}: {_first_line(error)})",
        ) from error
    found: object = getattr(module, attribute, None)
    if found is None:
        hint = did_you_mean(near_names(attribute, dir(module)))
        raise ModelSourceError(source, f"module {module_name} has no {attribute!r}{hint}")
    if not callable(found):
        raise ModelSourceError(
            source, f"{attribute} is a {type(found).__name__}, and must be {wanted}"
        )
    return found


def _call_factory(source: str, factory: Callable[[], object]) -> ModelSource:
    try:
        made = factory()
    except Exception as error:
        raise ModelSourceError(
            source, f"the factory failed ({type(error).__name__}: {_first_line(error)})"
        ) from error
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        shown = ", ".join(type(part).__name__ for part in parts)
        raise ModelSourceError(
            source,
            f"the factory returned ({shown}), and must return a model, "
            "(model, example_inputs) or (model, example_inputs, calibration)",
        )
    example = _as_batch(source, "example_inputs", parts[1]) if len(parts) > 1 else None
    calibration = _as_batches(source, parts[2]) if len(parts) > 2 else None
    return ModelSource(parts[0], example, calibration)


def _load_npz(path: Path, example_inputs: Batch | None) -> tuple[Batch, ...]:
    if not example_inputs:
        raise ModelSourceError(
            str(path),
            "a .npz is cut into batches of the example's size, and there are no example "
            "inputs; let the factory return (model, example_inputs)",
        )
    arrays = _read_npz(path)
    if isinstance(example_inputs, dict) and set(arrays) != set(example_inputs):
        raise ModelSourceError(
            str(path),
            f"holds the arrays {', '.join(arrays)}, and the model's inputs are "
            f"{', '.join(example_inputs)}",
        )
    if len(arrays) != len(example_inputs):
        raise ModelSourceError(
            str(path),
            f"holds {len(arrays)} arrays, and the model has {len(example_inputs)} inputs",
        )
    batch_size = _first_size(next(iter(_tensors(example_inputs))))
    batches = zip(*_cut(path, list(arrays.values()), batch_size), strict=True)
    if isinstance(example_inputs, dict):
        return tuple(dict(zip(arrays, batch, strict=True)) for batch in batches)
    return tuple(batches)


def _read_npz(path: Path) -> dict[str, torch.Tensor]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ModelSourceError(str(path), f"not a .npz file ({_first_line(error)})") from error


def _cut(
    path: Path, arrays: Sequence[torch.Tensor], batch_size: int
) -> list[tuple[torch.Tensor, ...]]:
    samples = sorted({_first_size(array) for array in arrays})
    if len(samples) > 1 or batch_size < 1 or samples[0] < batch_size:
        raise ModelSourceError(
            str(path),
            f"the first axis has {' and '.join(map(str, samples))} samples, and a batch "
            f"needs {batch_size}; each array needs the same number, at least one batch",
        )
    whole = samples[0] // batch_size * batch_size
    return [torch.split(array[:whole], batch_size) for array in arrays]


def _first_size(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 0


def _load_pt(path: Path) -> tuple[Batch, ...]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the broken part of the file caused
        raise ModelSourceError(
            str(path),
            "not a list of tuples of tensors that `torch.save` wrote "
            f"({type(error).__name__}: {_first_line(error)})",
        ) from error
    return _as_batches(str(path), loaded)


def _as_batches(source: str, value: Any) -> tuple[Batch, ...]:
    if isinstance(value, torch.Tensor | str | bytes | dict) or not hasattr(value, "__iter__"):
        raise ModelSourceError(
            source,
            f"the data are a {type(value).__name__}, and must be a list with one tuple of "
            "tensors per batch",
        )
    return tuple(_as_batch(source, f"batch {index}", batch) for index, batch in enumerate(value))


def _as_batch(source: str, what: str, value: object) -> Batch:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, tuple | list):
        batch: Batch = tuple(value)
    elif isinstance(value, Mapping):  # such as a tokenizer's output
        batch = {str(name): tensor for name, tensor in value.items()}
    else:
        raise ModelSourceError(
            source, f"{what}: expected a tuple of tensors, got a {type(value).__name__}"
        )
    for tensor in _tensors(batch):
        if not isinstance(tensor, torch.Tensor):
            raise ModelSourceError(
                source, f"{what}: expected tensors, got a {type(tensor).__name__} among them"
            )
    return batch


def _tensors(batch: Batch) -> Iterable[torch.Tensor]:
    return batch.values() if isinstance(batch, dict) else batch


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """A console script, unlike ``python -m``, doesn't find modules where it is called."""
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
