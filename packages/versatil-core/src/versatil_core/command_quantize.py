"""What ``versatil quantize`` and ``versatil inspect`` do, apart from the command line."""

from collections.abc import Callable
from pathlib import Path

from torch.fx import GraphModule

from versatil_core.audit import Audit, audit
from versatil_core.backend import BasePT2EBackend
from versatil_core.command_targets import TargetOptions, read_targets
from versatil_core.discovery import create_backend
from versatil_core.model_factory import ModelSourceError, load_batches, load_model_source
from versatil_core.observer_choice import Observers
from versatil_core.progress import StageProgress
from versatil_core.quantize import quantize
from versatil_core.reference_info import reference_info
from versatil_core.saved_reference import save

__all__ = ["backend_of", "quantize_to_file"]


def quantize_to_file(
    source: str,
    output: Path,
    make_backend: Callable[[bool | None], BasePT2EBackend],
    calibration_path: Path | None,
    progress: StageProgress,
    *,
    targets: TargetOptions,
    equalize: bool = False,
    observers: Observers = None,
    patience: int | None = None,
) -> Audit:
    """Quantize what ``source`` names and save the reference.

    Args:
        source: See `versatil_core.model_factory.load_model_source`.
        output: Replaced as a whole at the very end.
        make_backend: Makes what to quantize for: dynamic, static (False), or as is the default.
        calibration_path: See `versatil_core.model_factory.load_batches`; goes before
            what a factory returns.
        progress: Shows the stages.
        targets: Which parts of the model are quantized.
        equalize: See `versatil_core.quantize.quantize`.
        observers: Likewise.
        patience: Likewise.

    Returns:
        The audit of what was written.

    Raises:
        ModelSourceError: The source or the calibration file can't be used.
        VersatilError: See `versatil_core.quantize.quantize`.
    """
    with progress.stage("load the model"):
        loaded = load_model_source(source)
    calibration = loaded.calibration
    if calibration_path is not None:
        with progress.stage("load the calibration data"):
            calibration = load_batches(calibration_path, loaded.example_inputs)
    example = loaded.example_inputs or next(iter(calibration or ()), None)
    if example is None:
        raise ModelSourceError(
            source,
            "there are no example inputs; let the factory return (model, example_inputs), "
            "or give --calibration",
        )
    with progress.stage("calibrate and quantize"):
        reference = quantize(
            loaded.model,
            example,
            read_targets(loaded.model, targets, make_backend),
            calibration,
            dynamic_shapes=loaded.dynamic_shapes,
            equalize=equalize,
            observers=observers,
            patience=patience,
        )
    with progress.stage("audit and save"):
        result = audit(reference, backend_of(reference))
        save(reference, output)
    return result


def backend_of(reference: GraphModule) -> BasePT2EBackend:
    """Make the backend that a reference was quantized for.

    Raises:
        BackendNotFoundError: It isn't installed here.
    """
    target = reference_info(reference).targets[0]
    return create_backend(target.backend, target.options)
