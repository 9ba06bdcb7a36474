"""Saves a reference into one portable file, and loads it in a process that knows nothing of it."""

import io
import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from versatil_core import _torch_compat
from versatil_core.convert import allow_mode_calls
from versatil_core.errors import LoweringError, ModelFileError
from versatil_core.export import input_specs
from versatil_core.lower import is_lowered
from versatil_core.manifest import (
    PORTABLE,
    check_kind,
    check_torch_of_portable,
    manifest_values,
    parse_manifest,
)
from versatil_core.model_file import read_model_file, write_model_file
from versatil_core.program_check import PRIVATE_NOTES, check_program
from versatil_core.reexport import placeholder, reexport
from versatil_core.reference_info import (
    InputSpec,
    ReferenceInfo,
    attach_reference_info,
    reference_info,
)
from versatil_core.size_expressions import ProgramError
from versatil_core.versions import check_versions

_MAX_REASON = 500
_PROGRAM = "models/model.json"
# torch keeps example inputs as a pickle; they can be made from the manifest instead.
_EXAMPLES = "data/sample_inputs/model.pt"
_PAYLOADS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
# Other names are those of pickles.
_RAW_NAME = re.compile(r"(weight|tensor)_\d+")
_NEEDED = (_PROGRAM, _EXAMPLES, *_PAYLOADS)


def save(reference: GraphModule, path: str | os.PathLike[str]) -> None:
    """Write a reference into a portable file.

    It holds the graph, the int8 weights, and what else is read of the model's state, by their
    names in the float model; and no pickle. The file appears all at once: if anything fails,
    what was there before is still there.

    Args:
        reference: From :func:`versatil_core.quantize` or :func:`load`.
        path: The file; ``.pt2`` is customary. Its folder must exist.

    Raises:
        ModelFileError: The folder does not exist or cannot be written to, ``reference`` is no
            reference, or it holds what only a pickle could keep.
        LoweringError: ``reference`` is lowered.
        UnsupportedVersionError: torch or torchao is outside the tested range.

    Example:
        >>> from versatil_core import load, quantize, host_backend
        >>> model, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
        >>> reference = quantize(model, x, host_backend(), calibration=[x])
        >>> save(reference, "model.pt2")
        >>> torch.equal(load("model.pt2")(x), reference(x))
        True
    """
    check_versions()
    if is_lowered(reference):
        raise LoweringError(
            "a lowered module is for this machine: save the reference that it was lowered from"
        )
    info = reference_info(reference)
    members = _archive_members(reference, info)
    try:
        _check_members(members)
        _module(members, info)
    # Whatever torch finds wrong with its own text, such as a comma in the name of a module.
    except Exception as error:
        raise ModelFileError(
            f"{path} cannot be written, since the file could not be loaded again: "
            f"{type(error).__name__}: {_brief(error)}",
            path=str(path),
        ) from error
    write_model_file(path, manifest_values(info), members)


def load(path: str | os.PathLike[str]) -> GraphModule:
    """Load a reference.

    Nothing else has to be imported, and the backend that it was quantized for need not be
    installed. The whole file is checked before torch sees it, nothing is unpickled, and its graph
    may only call operators.

    Args:
        path: A file from :func:`save`.

    Returns:
        The reference, equal to the saved one.

    Raises:
        ModelFileError: The file is missing, damaged, changed, of another format version, a package,
            or no model file.
        UnsupportedVersionError: torch or torchao is outside the tested range, or a newer torch
            wrote the file.
    """
    check_versions()
    file = read_model_file(path)
    manifest = parse_manifest(path, file.manifest)
    check_kind(path, manifest, PORTABLE)
    check_torch_of_portable(path, manifest)
    _torch_compat.register_quantized_ops()
    try:
        members = dict(file.members)
        _check_members(members)
        module = _module(members, manifest.info)
    # torch has no error of its own for programs that it can't read.
    except Exception as error:
        versions = ", ".join(f"{name} {v}" for name, v in manifest.written_with.items())
        raise ModelFileError(
            f"{path} cannot be loaded: {type(error).__name__}: {_brief(error)}. It was written with "
            f"{versions}, this is torch {torch.__version__}; if they agree, the file is damaged or "
            f"was made to do harm",
            path=str(path),
        ) from error
    module.requires_grad_(False)
    allow_mode_calls(module)
    attach_reference_info(module, manifest.info)
    return module


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON].rstrip(".")


def _are_alike(graph: Sequence[InputSpec], manifest: Sequence[InputSpec]) -> bool:
    """Whether two descriptions have the same names, dtypes and fixed sizes; symbols may be others."""

    def outline(spec: InputSpec) -> tuple[Any, ...]:
        sizes = [size if isinstance(size, int) else None for size in spec.shape or ()]
        return spec.name, spec.dtype, spec.shape is None, sizes

    return [*map(outline, graph)] == [*map(outline, manifest)]


def _archive_members(reference: GraphModule, info: ReferenceInfo) -> dict[str, bytes]:
    """Export a reference once more, and return what torch would put into a file, without pickles."""
    program = reexport(reference, info)
    _drop_private_notes(program)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {
            # Empty instead of missing, so that torch.export.load reads the file, too.
            name: b"" if name.endswith(_EXAMPLES) else archive.read(name)
            for name in archive.namelist()
            # A random number, which would make each file another.
            if not name.endswith("/.data/serialization_id")
        }


def _drop_private_notes(program: torch.export.ExportedProgram) -> None:
    """Forget the source code that nodes came from; the paths of modules stay."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, GraphModule)]
    for node in [node for graph in graphs for node in graph.nodes]:
        for note in PRIVATE_NOTES:
            node.meta.pop(note, None)


def _check_members(members: dict[str, bytes]) -> None:
    """Refuse a pickle, and a program that calls anything but operators.

    Raises:
        ProgramError: There is one.
    """
    root = next(iter(members)).partition("/")[0]
    allowed = {
        f"{root}/{name}"
        for name in ("archive_format", "archive_version", "byteorder", ".data/version")
    }
    allowed |= {f"{root}/{name}" for name in _NEEDED}
    if missing := sorted(f"{root}/{name}" for name in _NEEDED if f"{root}/{name}" not in members):
        raise ProgramError(f"{', '.join(missing)} is missing")
    for name in _PAYLOADS:
        for tensor, payload in json.loads(members[f"{root}/{name}"])["config"].items():
            # Torch also goes by the name of the member.
            path_name, meta = payload["path_name"], payload["tensor_meta"]
            if payload["use_pickle"] is not False or not _RAW_NAME.fullmatch(path_name):
                raise ProgramError(
                    f"{tensor} is no plain tensor, so that only a pickle could hold it, and a pickle "
                    f"can run anything when it is read"
                )
            if meta["device"]["type"] != "cpu":
                raise ProgramError(
                    f"{tensor} is on the device {meta['device']['type']!r}, not on the CPU"
                )
            path = f"{root}/{name.rpartition('/')[0]}/{path_name}"
            _check_size(tensor, meta["sizes"], members.get(path, b""))
            allowed.add(path)
    if unknown := sorted(members.keys() - allowed):
        raise ProgramError(f"{', '.join(unknown[:3])} has no place in a portable file")
    if members[f"{root}/{_EXAMPLES}"]:
        raise ProgramError(f"{_EXAMPLES} is a pickle, which can run anything when it is read")
    check_program(members[f"{root}/{_PROGRAM}"])


def _check_size(tensor: str, sizes: Sequence[Mapping[str, int]], data: bytes) -> None:
    """Refuse a tensor without values: torch would make one of any size."""
    if not data and 0 not in [size["as_int"] for size in sizes]:
        raise ProgramError(f"there are no values of {tensor}")


def _module(members: dict[str, bytes], info: ReferenceInfo) -> GraphModule:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    buffer.seek(0)
    program = _torch_compat.load_program(buffer)
    # Without examples torch leaves out the checks of the inputs; it reads no values of them.
    leaves = [*map(placeholder, info.inputs)]
    program.example_inputs = _torch_compat.unflatten_for_program(program, leaves)
    module = program.module()
    assert isinstance(module, GraphModule)
    if not _are_alike(input_specs(module), info.inputs):
        raise ProgramError("the manifest describes other inputs than the graph takes")
    return module
