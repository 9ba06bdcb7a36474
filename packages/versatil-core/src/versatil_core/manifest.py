"""What a model file says about itself: what it holds, how it was made, where it may run."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from packaging.version import Version

from versatil_core.__about__ import __version__
from versatil_core.errors import ModelFileError, UnsupportedVersionError
from versatil_core.model_file import read_manifest_values
from versatil_core.reference_info import ReferenceInfo, TargetInfo, target_info, texts
from versatil_core.versions import SUPPORTED_VERSIONS, installed_version, minor
from versatil_passes.versions import ALLOW_UNTESTED_VERSIONS, is_anything_allowed

FORMAT_VERSION = 2
PORTABLE = "portable"
PACKAGE = "package"


@dataclass(frozen=True)
class PackageInfo:
    """How a package was compiled, and what it needs.

    Attributes:
        backend: The backend that compiled it, with its options.
        machine: ``platform.machine()`` of the CPU it is for, in lower case.
        cpu: Name of the CPU that it was made on.
        cpu_features: Instruction sets that its code uses, by their kernel names.
        settings: Inductor and environment values that were in force, as text.
        audit: What :meth:`versatil_core.Audit.to_dict` gave.
        int8_kernel_calls: How many calls of int8 kernels are in its code.
    """

    backend: TargetInfo
    machine: str
    cpu: str
    cpu_features: tuple[str, ...]
    settings: Mapping[str, str]
    audit: Mapping[str, Any]
    int8_kernel_calls: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild what ``dataclasses.asdict`` gave.

        Raises:
            KeyError: A field is missing.
            TypeError: A field is not what it should be.
        """
        return cls(
            backend=target_info(values["backend"]),
            machine=str(values["machine"]),
            cpu=str(values["cpu"]),
            cpu_features=tuple(map(str, values["cpu_features"])),
            settings=texts(values["settings"]),
            audit=dict(values["audit"]),
            int8_kernel_calls=int(values["int8_kernel_calls"]),
        )


@dataclass(frozen=True)
class Manifest:
    """The manifest of a model file.

    Attributes:
        format_version: Version of the file format.
        kind: ``"portable"``, from :func:`versatil_core.save`, or ``"package"``, from
            :func:`versatil_core.package`.
        info: How the reference was made, for which backends, and which inputs it takes.
        written_with: Distribution -> version with which the file was written; ``info.versions``
            are those with which the model was quantized.
        package: How a package was compiled; None in a portable file.
        members: Member of the archive -> its SHA-256, in hexadecimal digits.
    """

    format_version: int
    kind: str
    info: ReferenceInfo
    written_with: Mapping[str, str]
    package: PackageInfo | None
    members: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def manifest_values(info: ReferenceInfo, package: PackageInfo | None = None) -> dict[str, Any]:
    """Return what to write into a file; :func:`versatil_core.model_file.write_model_file` adds the members."""
    return {
        "format_version": FORMAT_VERSION,
        "kind": PORTABLE if package is None else PACKAGE,
        "info": info.to_dict(),
        "written_with": current_versions(),
        "package": None if package is None else asdict(package),
    }


def current_versions() -> dict[str, str]:
    """Return distribution -> version of what reads and writes files here."""
    return {
        **{name: installed_version(name) for name in SUPPORTED_VERSIONS},
        "versatil-core": __version__,
    }


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read what a model file says about itself, without loading the model or running anything.

    Args:
        path: A file from :func:`versatil_core.save` or :func:`versatil_core.package`.

    Raises:
        ModelFileError: The file is missing, damaged, of another format version or no model file.
    """
    return parse_manifest(path, read_manifest_values(path))


def parse_manifest(path: str | os.PathLike[str], values: Mapping[str, Any]) -> Manifest:
    """Make sense of the values of a manifest.

    Raises:
        ModelFileError: Its format version is another, or a field is missing or damaged.
    """
    found = values.get("format_version")
    try:
        if found != FORMAT_VERSION:
            raise _other_format(path, values)
        package = values["package"]
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            kind=str(values["kind"]),
            info=ReferenceInfo.from_dict(values["info"]),
            written_with=texts(values["written_with"]),
            package=None if package is None else PackageInfo.from_dict(package),
            members=texts(values["members"]),
        )
        if manifest.kind != (PORTABLE if package is None else PACKAGE):
            raise ValueError(f"kind {manifest.kind!r}")  # noqa: TRY301 -- explained below
        Version(manifest.written_with["torch"])
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(
            f"{path} holds a damaged manifest: {type(error).__name__}: {error}. Save it anew",
            path=str(path),
        ) from error
    return manifest


def check_kind(path: str | os.PathLike[str], manifest: Manifest, kind: str) -> None:
    """Refuse a file of the other kind.

    Raises:
        ModelFileError: It is; the message names the function to call.
    """
    if manifest.kind == kind:
        return
    remedy = {
        PORTABLE: "it is a portable reference: versatil_core.load() reads it, and compile() or "
        "package() make it run fast",
        PACKAGE: "it is a package, native code for one kind of CPU: versatil_core.load_package() "
        "reads it, if you trust its origin",
    }
    raise ModelFileError(f"{path}: {remedy[manifest.kind]}", path=str(path))


def check_torch_of_portable(path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Refuse a portable file that a newer torch wrote; older ones are fine.

    Raises:
        UnsupportedVersionError: It was, and ``VERSATIL_ALLOW_UNTESTED_VERSIONS`` is not ``1``.
    """
    here, there = installed_version("torch"), manifest.written_with["torch"]
    if _release(minor(there)) > _release(minor(here)) and not is_anything_allowed():
        raise UnsupportedVersionError(
            f"{path} was written with torch {there}, and this is torch {here}: files are read by "
            f"the torch that wrote them and by newer ones. Run: pip install 'torch>={minor(there)}', "
            f"save it anew with torch {minor(here)}, or set {ALLOW_UNTESTED_VERSIONS}=1 to try it all "
            f"the same",
            distribution="torch",
            version=here,
            supported=f">={minor(there)}",
        )


def check_torch_of_package(path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Refuse a package that another torch made: its code calls into that torch.

    Raises:
        UnsupportedVersionError: It is of another minor version, and
            ``VERSATIL_ALLOW_UNTESTED_VERSIONS`` is not ``1``.
    """
    here, there = installed_version("torch"), manifest.written_with["torch"]
    if minor(there) != minor(here) and not is_anything_allowed():
        raise UnsupportedVersionError(
            f"{path} was packaged with torch {there}, and this is torch {here}: its code belongs to "
            f"torch {minor(there)}. Run: pip install 'torch=={minor(there)}.*', or load() the "
            f"portable file here and package() it anew",
            distribution="torch",
            version=here,
            supported=f"=={minor(there)}.*",
        )


def _other_format(path: str | os.PathLike[str], values: Mapping[str, Any]) -> ModelFileError:
    found = values.get("format_version")
    versions = values.get("written_with") or values.get("versions")
    writer = (
        versions.get("versatil-core", "unknown") if isinstance(versions, Mapping) else "unknown"
    )
    return ModelFileError(
        f"{path} has the format version {found!r}, and this versatil-core {__version__} reads "
        f"{FORMAT_VERSION}: use the versatil-core that wrote it ({writer}), or save it anew",
        path=str(path),
    )


def _release(version: str) -> tuple[int, ...]:
    return Version(version).release
