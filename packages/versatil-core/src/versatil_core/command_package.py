"""What ``versatil package`` does, apart from the command line."""

from pathlib import Path

from versatil_core.command_quantize import backend_of
from versatil_core.discovery import host_backend
from versatil_core.host import INT8_FEATURES
from versatil_core.manifest import Manifest
from versatil_core.package import package
from versatil_core.progress import StageProgress
from versatil_core.reexport import example_call
from versatil_core.reference_info import reference_info
from versatil_core.saved_reference import load

__all__ = ["package_file", "package_lines"]


def package_file(
    path: Path, output: Path, backend_name: str | None, progress: StageProgress
) -> Manifest:
    """Package a portable file.

    Args:
        path: A portable file.
        output: Replaced as a whole at the very end.
        backend_name: What to compile for; ``"auto"`` is what suits this machine, None what the
            model was quantized for.
        progress: Shows the stages.

    Returns:
        What the package says about itself.

    Raises:
        VersatilError: See `versatil_core.load` and `versatil_core.package`.
    """
    with progress.stage("load the model"):
        reference = load(path)
        if backend_name is None:
            backend = backend_of(reference)
        else:
            backend = host_backend(None if backend_name == "auto" else backend_name)
    example = example_call(reference, reference_info(reference))
    with progress.stage("compile and verify"):
        return package(reference, example, backend, output)


def package_lines(manifest: Manifest) -> list[str]:
    """Say what of a package was verified, and where it runs."""
    made = manifest.package
    assert made is not None
    layers = f"{made.audit['int8_count']} of {made.audit['layer_count']} layers"
    int8 = [name for name in INT8_FEATURES if name in made.cpu_features]
    others = len(made.cpu_features) - len(int8)
    instructions = (
        f"{', '.join(int8) or 'no int8 instructions'} and {others} other instruction sets"
    )
    return [
        f"Verified: {made.int8_kernel_calls} int8 kernels for {layers}, results like the reference's",
        f"Runs with: torch {manifest.written_with['torch']}, {made.machine}, {instructions}",
    ]
