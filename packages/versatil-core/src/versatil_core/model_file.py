"""The archives that models are kept in, read with suspicion: nothing of one is used before all of it is checked."""

import hashlib
import json
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from versatil_core.atomic_file import replacing
from versatil_core.errors import ModelFileError

MANIFEST_NAME = "versatil_manifest.json"
# Text shrinks to about a tenth; what claims to grow beyond this is made to fill the memory. The
# limit of deflate itself is about 1000.
_MAX_GROWTH = 100
_MAX_MANIFEST_BYTES = 64 * 2**20
_MAX_MEMBERS = 100_000
_COMPRESSED = (".json", ".cpp", ".h")
_SAFE_NAME = re.compile(r"[\w.\-+]+(/[\w.\-+]+)*")
# Whatever zipfile raises for a damaged archive.
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError),
    *(ValueError, RuntimeError, OverflowError),
)


@dataclass(frozen=True)
class ModelFile:
    """A checked archive.

    Attributes:
        path: Where it was read.
        manifest: The values of its manifest.
        members: Name -> content of everything else, each as the manifest's SHA-256 says.
    """

    path: str
    manifest: Mapping[str, Any]
    members: Mapping[str, bytes]


def write_model_file(
    path: str | os.PathLike[str], manifest: Mapping[str, Any], members: Mapping[str, bytes]
) -> None:
    """Write an archive; it appears all at once.

    The same content gives the same bytes.

    Args:
        path: The file; what was there before is replaced at the very end, or stays.
        manifest: JSON values; the SHA-256 of each member is added under ``"members"``.
        members: Name -> content, all under one top folder.

    Raises:
        ModelFileError: The file cannot be written.
    """
    digests = {name: _sha256(data) for name, data in members.items()}
    text = json.dumps({**manifest, "members": digests}, indent=1)
    root = next(iter(members)).partition("/")[0]
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        # First, so that it is quick to find, also by eye.
        _write(archive, f"{root}/extra/{MANIFEST_NAME}", text.encode())
        for name, data in members.items():
            _write(archive, name, data)


def read_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """Read and check an archive.

    Args:
        path: The file.

    Returns:
        Its content, in memory: a file that is replaced afterwards changes nothing.

    Raises:
        ModelFileError: The file is missing, is no archive of ours, is damaged or truncated; a
            member is missing, is there twice or too many, has another SHA-256 than the manifest
            says, a name that leads out of the archive, or a size that it cannot have.
    """
    with _Archive(path) as archive:
        manifest = archive.manifest()
        members = {info.filename: archive.read(info) for info in archive.others()}
    _check_digests(path, manifest, members)
    return ModelFile(str(path), manifest, members)


def read_manifest_values(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read only the manifest of an archive; its other members are not read.

    Raises:
        ModelFileError: The file is missing, is no archive of ours, or is damaged.
    """
    with _Archive(path) as archive:
        return archive.manifest()


class _Archive:
    """An open archive whose names and sizes are checked; what fails inside is a `ModelFileError`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def __enter__(self) -> Self:
        try:
            self._zip = zipfile.ZipFile(self._path)
        except FileNotFoundError as error:
            raise ModelFileError(f"{self._path} does not exist", path=str(self._path)) from error
        except _DAMAGE as error:
            raise ModelFileError(
                f"{self._path} is not a model file, or is damaged or cut short: {error}. A model "
                f"file is what versatil_core.save(), versatil_core.package() or `versatil "
                f"quantize` writes",
                path=str(self._path),
            ) from error
        try:
            self._infos = _checked_infos(self._path, self._zip.infolist())
        except BaseException:
            self._zip.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._zip.close()

    def manifest(self) -> Mapping[str, Any]:
        """Read the manifest."""
        found = [info for info in self._infos if _is_manifest(info)]
        if len(found) != 1:
            raise ModelFileError(
                f"{self._path} has {'no' if not found else 'more than one'} manifest: it is damaged, "
                f"or was not written by versatil_core.save() or package(). A program from "
                f"torch.export.save is float; quantize it first",
                path=str(self._path),
            )
        if found[0].file_size > _MAX_MANIFEST_BYTES:
            raise _absurd(self._path, found[0])
        try:
            values = json.loads(self.read(found[0]))
        # A text that nests too deeply is a RecursionError.
        except (ValueError, RecursionError) as error:
            raise ModelFileError(
                f"{self._path} holds a damaged manifest: {type(error).__name__}: {error}. Save it anew",
                path=str(self._path),
            ) from error
        if not isinstance(values, dict):
            raise ModelFileError(
                f"{self._path} holds a damaged manifest: {type(values).__name__} instead of names "
                f"and values. Save it anew",
                path=str(self._path),
            )
        return values

    def others(self) -> list[zipfile.ZipInfo]:
        """List what is no manifest."""
        return [info for info in self._infos if not _is_manifest(info)]

    def read(self, info: zipfile.ZipInfo) -> bytes:
        """Read one member."""
        try:
            return self._zip.read(info)
        except (*_DAMAGE, MemoryError) as error:
            raise ModelFileError(
                f"{self._path} is damaged: {info.filename} cannot be read: {error}. Copy it or save it anew",
                path=str(self._path),
            ) from error


def _checked_infos(
    path: str | os.PathLike[str], infos: list[zipfile.ZipInfo]
) -> list[zipfile.ZipInfo]:
    """Refuse names and sizes that no file of ours has."""
    if len(infos) > _MAX_MEMBERS:
        raise ModelFileError(
            f"{path} claims to hold {len(infos)} members; a model file has a few hundred. It is "
            f"damaged or was made to do harm",
            path=str(path),
        )
    size, seen = Path(path).stat().st_size, set()
    for info in infos:
        if info.filename in seen:
            raise ModelFileError(
                f"{path} holds {info.filename!r} twice: it is damaged or was made to do harm",
                path=str(path),
            )
        seen.add(info.filename)
        if _leads_out(info):
            raise ModelFileError(
                f"{path} holds a member named {info.filename!r}, which is no plain name inside the "
                f"archive: it was made to write elsewhere. Nothing was read",
                path=str(path),
            )
        if not _is_size_possible(info, size):
            raise _absurd(path, info)
    return infos


def _leads_out(info: zipfile.ZipInfo) -> bool:
    parts = info.filename.split("/")
    is_link = stat.S_ISLNK(info.external_attr >> 16)
    return is_link or ".." in parts or not _SAFE_NAME.fullmatch(info.filename)


def _is_size_possible(info: zipfile.ZipInfo, file_bytes: int) -> bool:
    if info.compress_size > file_bytes:
        return False
    if info.compress_type == zipfile.ZIP_STORED:
        return info.file_size == info.compress_size
    return info.file_size <= _MAX_GROWTH * info.compress_size


def _absurd(path: str | os.PathLike[str], info: zipfile.ZipInfo) -> ModelFileError:
    return ModelFileError(
        f"{path} holds {info.filename!r}, which claims to grow from {info.compress_size} to "
        f"{info.file_size} bytes: it is damaged or was made to fill the memory. Nothing was read",
        path=str(path),
    )


def _check_digests(
    path: str | os.PathLike[str], manifest: Mapping[str, Any], members: Mapping[str, bytes]
) -> None:
    promised = manifest.get("members")
    if not isinstance(promised, dict):
        raise ModelFileError(
            f"{path} holds a damaged manifest: it does not list the members. Save it anew",
            path=str(path),
        )
    _refuse(path, "lacks", promised.keys() - members.keys())
    _refuse(path, "holds, and its manifest does not list,", members.keys() - promised.keys())
    changed = [name for name, data in members.items() if _sha256(data) != promised[name]]
    _refuse(path, "was changed after it was written: its manifest has another SHA-256 for", changed)


def _refuse(path: str | os.PathLike[str], what: str, names: Iterable[str]) -> None:
    if names := sorted(names):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ModelFileError(
            f"{path} {what} {', '.join(names[:3])}{more}. Copy it or save it anew", path=str(path)
        )


def _write(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    # A fixed date, and deflate only for text: numbers barely shrink.
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o644 << 16
    is_text = name.endswith(_COMPRESSED)
    info.compress_type = zipfile.ZIP_DEFLATED if is_text else zipfile.ZIP_STORED
    archive.writestr(info, data)


def _is_manifest(info: zipfile.ZipInfo) -> bool:
    return info.filename.rpartition("/")[2] == MANIFEST_NAME


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
