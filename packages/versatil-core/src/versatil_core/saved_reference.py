"""Saves a reference into one portable file, and loads it in a process that knows nothing of it."""

import contextlib
import json
import os
import secrets
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.fx import GraphModule

from versatil_core import _torch_compat
from versatil_core.errors import ModelFileError
from versatil_core.quantize import allow_mode_calls
from versatil_core.reference_info import (
    InputSpec,
    ReferenceInfo,
    attach_reference_info,
    reference_info,
)
from versatil_core.versions import check_versions

FORMAT_VERSION = 1
_MANIFEST = "versatil_manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a saved file says about its model.

    Attributes:
        format_version: Version of the file format.
        info: How the reference was made, for which backends, and which inputs it takes.
    """

    format_version: int
    info: ReferenceInfo


def save(reference: GraphModule, path: str | os.PathLike[str]) -> None:
    """Write a reference into a file.

    The file appears all at once: if anything fails, what was there before is still there.

    Args:
        reference: From :func:`versatil_core.quantize` or :func:`load`.
        path: The file; ``.pt2`` is customary. Its folder must exist.

    Raises:
        ModelFileError: The folder does not exist or cannot be written to, or ``reference`` is no
            reference.
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
    path = Path(path)
    info = reference_info(reference)
    manifest = json.dumps({"format_version": FORMAT_VERSION, **info.to_dict()})
    args, kwargs = _torch_compat.unflatten_for_call(reference, [*map(_example, info.inputs)])
    with torch.no_grad():
        program = torch.export.export(
            reference, args, kwargs, dynamic_shapes=_dynamic_shapes(reference, info)
        )
    with _replacing(path) as file:
        torch.export.save(program, file, extra_files={_MANIFEST: manifest})


def load(path: str | os.PathLike[str]) -> GraphModule:
    """Load a reference.

    Nothing else has to be imported, and the backend that it was quantized for need not be
    installed. Load only files you trust: ``torch.export.load`` also reads pickled objects.

    Args:
        path: A file from :func:`save`.

    Returns:
        The reference, equal to the saved one.

    Raises:
        ModelFileError: The file is missing, damaged, of another format version or no saved
            reference.
        UnsupportedVersionError: torch or torchao is outside the tested range.
    """
    check_versions()
    manifest = read_manifest(path)
    _torch_compat.register_quantized_ops()
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"checksum of {damaged}")  # noqa: TRY301 -- explained below
        with Path(path).open("rb") as file:
            module = torch.export.load(file).module()
    # torch.export.load has no error of its own for damaged files.
    except Exception as error:
        versions = ", ".join(f"{name} {v}" for name, v in manifest.info.versions.items())
        raise ModelFileError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}. It was saved with "
            f"{versions}, this is torch {torch.__version__}; if they agree, the file is damaged",
            path=str(path),
        ) from error
    assert isinstance(module, GraphModule)
    module.requires_grad_(False)
    allow_mode_calls(module)
    attach_reference_info(module, manifest.info)
    return module


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read what a saved file says about its model, without loading the model.

    Args:
        path: A file from :func:`save`.

    Raises:
        ModelFileError: The file is missing, damaged, of another format version or no saved
            reference.
    """
    try:
        values = json.loads(_manifest_text(path))
        found = values.get("format_version")
        if found != FORMAT_VERSION:
            raise ModelFileError(
                f"{path} has the format version {found}, and this versatil-core reads "
                f"{FORMAT_VERSION}: use the versatil-core that saved it "
                f"({values.get('versions', {}).get('versatil-core', 'unknown')}), or save it anew",
                path=str(path),
            )
        return Manifest(found, ReferenceInfo.from_dict(values))
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ModelFileError(
            f"{path} holds a damaged manifest: {type(error).__name__}: {error}. Save it anew",
            path=str(path),
        ) from error


def _manifest_text(path: str | os.PathLike[str]) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.rpartition("/")[2] == _MANIFEST]
            if names:
                return archive.read(names[0]).decode()
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} does not exist", path=str(path)) from error
    except (zipfile.BadZipFile, OSError) as error:
        raise ModelFileError(
            f"{path} is not a model file, or is damaged: {error}. A model file is what "
            f"versatil_core.save() or `versatil quantize` writes",
            path=str(path),
        ) from error
    raise ModelFileError(
        f"{path} has no manifest: it is damaged, or was not written by versatil_core.save(). A "
        f"program from torch.export.save is float; quantize it first",
        path=str(path),
    )


def _example(spec: InputSpec) -> Any:
    if spec.shape is None:
        return spec.value
    sizes = [size if isinstance(size, int) else size.example for size in spec.shape]
    # Zeros are valid for every dtype, also as indices into an embedding.
    return torch.zeros(sizes, dtype=getattr(torch, str(spec.dtype).removeprefix("torch.")))


def _dynamic_shapes(reference: GraphModule, info: ReferenceInfo) -> Any:
    """Return shapes for exporting the reference again; limits and equal sizes are in its guards."""
    leaves = [
        None
        if spec.shape is None
        else {
            dim: torch.export.Dim.AUTO
            for dim, size in enumerate(spec.shape)
            if not isinstance(size, int)
        }
        for spec in info.inputs
    ]
    return _torch_compat.dynamic_shapes_for_call(reference, leaves)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of ``path`` if the block ends well."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be written: {error}. What was there before is unchanged",
            path=str(path),
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
