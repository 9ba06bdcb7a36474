"""What ``versatil inspect`` does, apart from the command line."""

from collections.abc import Callable
from pathlib import Path

from versatil_core.audit import Audit, audit
from versatil_core.backend import BasePT2EBackend
from versatil_core.command_quantize import backend_of
from versatil_core.errors import ModelFileError
from versatil_core.manifest import Manifest, parse_manifest
from versatil_core.model_file import read_model_file
from versatil_core.saved_reference import load

__all__ = ["audit_of_file", "checked_manifest"]


def checked_manifest(path: Path) -> Manifest:
    """Check a whole model file, and return what it says about itself.

    Raises:
        ModelFileError: It can't be used.
    """
    return parse_manifest(path, read_model_file(path).manifest)


def audit_of_file(
    path: Path, manifest: Manifest, choose_backend: Callable[[], BasePT2EBackend] | None
) -> Audit:
    """Say which layers of a model file are int8; no code in it is run.

    Args:
        path: A portable file or a package.
        manifest: Of the same file.
        choose_backend: Makes the backend to ask; None asks the one that the file names.

    Returns:
        The audit: of a package the one it was made with.

    Raises:
        ModelFileError: The file can't be used, or a backend was chosen for a package.
        BackendNotFoundError: The backend that a portable file names isn't installed here.
    """
    if manifest.package is None:
        reference = load(path)
        backend = backend_of(reference) if choose_backend is None else choose_backend()
        return audit(reference, backend)
    if choose_backend is not None:
        raise ModelFileError(
            f"{path} is a package, compiled for {manifest.package.backend.backend}: leave --backend "
            f"out, or inspect the portable file that it was made from",
            path=str(path),
        )
    try:
        return Audit.from_dict(manifest.package.audit)
    except (KeyError, TypeError) as error:
        raise ModelFileError(
            f"{path} holds a damaged manifest: {type(error).__name__}: {error}. Package it anew",
            path=str(path),
        ) from error
