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

__all__ = ["inspect_file"]


def inspect_file(
    path: Path, choose_backend: Callable[[], BasePT2EBackend] | None
) -> tuple[Manifest, Audit]:
    """Check a model file and say which of its layers are int8; no code in it is run.

    Args:
        path: A portable file or a package.
        choose_backend: Makes the backend to ask; None asks the one that the file names.

    Returns:
        The manifest, and the audit: of a package the one it was made with.

    Raises:
        ModelFileError: The file can't be used, or a backend was chosen for a package.
        BackendNotFoundError: The backend that a portable file names isn't installed here.
    """
    manifest = parse_manifest(path, read_model_file(path).manifest)
    if manifest.package is None:
        reference = load(path)
        backend = backend_of(reference) if choose_backend is None else choose_backend()
        return manifest, audit(reference, backend)
    if choose_backend is not None:
        raise ModelFileError(
            f"{path} is a package, compiled for {manifest.package.backend.backend}: leave --backend "
            f"out, or inspect the portable file that it was made from",
            path=str(path),
        )
    try:
        return manifest, Audit.from_dict(manifest.package.audit)
    except (KeyError, TypeError) as error:
        raise ModelFileError(
            f"{path} holds a damaged manifest: {type(error).__name__}: {error}. Package it anew",
            path=str(path),
        ) from error
