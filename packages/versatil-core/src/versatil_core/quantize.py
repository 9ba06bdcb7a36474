"""Turns a float model into a reference: quantize and dequantize around float operators."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from versatil_core.calibration import (
    CalibrationData,
    check_patience,
    checked_calls,
    first_batch_checked,
    positional_names,
    show_batches,
)
from versatil_core.convert import convert_in_place
from versatil_core.equalization import MAX_BATCHES, apply_in_place, decide
from versatil_core.errors import CalibrationError, TrainingUnsupportedError
from versatil_core.export import (
    ModelInputs,
    check_devices,
    export,
    input_specs,
    model_inputs,
    tracing,
)
from versatil_core.manifest import current_versions
from versatil_core.observer_choice import Observers, check_fixed_ranges, observer_choice
from versatil_core.prepare import own_copy, prepare_in_place
from versatil_core.reference_info import (
    EqualizedLayers,
    ReferenceInfo,
    attach_reference_info,
)
from versatil_core.targets import (
    QuantizationTarget,
    Targets,
    as_targets,
    check_module_paths,
    check_targets,
    common_device_types,
    target_info_of,
)
from versatil_core.versions import check_versions


def quantize(
    model: torch.nn.Module,
    example_inputs: Any,
    backend_or_targets: Targets,
    calibration: Iterable[Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
    equalize: bool = False,
    observers: Observers = None,
    patience: int | None = None,
    progress: bool = False,
) -> GraphModule:
    """Quantize a float model; the model itself is never changed.

    Args:
        model: A float model on the CPU. It is quantized as in eval mode, whatever its mode is.
        example_inputs: A tensor, a tuple of inputs, or a mapping of inputs by name.
        backend_or_targets: A backend for the whole model, or one
            :class:`~versatil_core.QuantizationTarget` or several, whose modules must not overlap.
        calibration: Batches of representative inputs, in the forms of ``example_inputs``; a
            ``DataLoader`` is fine. Needed unless every backend is dynamic. Read once.
        dynamic_shapes: As for ``torch.export.export``; without it, all sizes are fixed.
        strict: As for ``torch.export.export``.
        equalize: Whether to move outliers from the inputs of linear layers into their weights
            first, which makes transformers more accurate. It needs calibration also for dynamic
            backends, of which it keeps up to eight batches in memory, and takes about a second
            for each layer. What it did is in ``reference_info(reference).equalized``.
        observers: How the ranges of activations are chosen: one of ``"min_max"``,
            ``"moving_average"``, ``"percentile"``, ``"mse"``, ``"entropy"`` and ``"histogram"``,
            or such names by module path or pattern; of two that match, the later one. Without it,
            as the backend has it. ``equalize`` goes by them, too.
        patience: Stop calibrating after so many batches in a row of which none moved a range by
            more than 1 %; None for all batches.
        progress: Whether to show the calibration's progress on stderr.

    Returns:
        The reference, a module that runs anywhere and that defines the numerical result. It has
        int8 weights. See :func:`versatil_core.compile` for the fast one.

    Raises:
        UnsupportedVersionError: torch or torchao is outside the tested range.
        TargetError: A target matches no module, or two overlap.
        CalibrationError: Calibration is missing, empty or does not fit the model; or no observer
            has such a name, or there is no fixed range for it to choose.
        UnsupportedDeviceError: A tensor is not on the CPU.
        ExportError: torch cannot capture the model.
        NothingQuantizedError: A target holds no operator that its backend quantizes.
        TrainingUnsupportedError: A backend has ``is_qat``.
        AutocastError: Autocast is on; use the backend's option ``float_dtype``.

    Example:
        >>> from versatil_core import host_backend
        >>> model, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
        >>> reference = quantize(model, x, host_backend(), calibration=[x])
        >>> reference(x).shape
        torch.Size([2, 4])
    """
    check_versions()
    targets = as_targets(backend_or_targets)
    check_targets(model, targets)
    _refuse_training(targets)
    choice = observer_choice(observers)
    check_fixed_ranges(choice, targets)
    check_patience(patience)
    check_module_paths(model, choice)
    batches = _calibration_batches(targets, calibration, equalize=equalize)
    device_types = common_device_types(targets)
    check_devices(model, model_inputs(example_inputs), device_types)
    with tracing:
        exported = export(
            model,
            example_inputs,
            dynamic_shapes=dynamic_shapes,
            strict=strict,
            supported_device_types=device_types,
        )
    names = positional_names(model)
    equalized: tuple[EqualizedLayers, ...] = ()
    if equalize and batches is not None:
        iterator = iter(batches)
        first = list(itertools.islice(iterator, MAX_BATCHES))
        batches = itertools.chain(first, iterator)
        calls = checked_calls(exported, first, example_inputs, names)
        equalized = _equalize_in_place(exported, targets, choice, calls)
    state = {name: buffer.clone() for name, buffer in exported.named_buffers()}
    prepared = prepare_in_place(exported, targets, choice)
    if batches is None:
        # Also the observers of the weights measure only while the model runs: without one call
        # every scale would be that of an empty tensor. But an example is no data, it may be all
        # zeros: nobody is shown what layers do with it.
        show_batches(
            prepared, [example_inputs], example_inputs, input_names=names, observe_layers=False
        )
        seen = CalibrationData(0, 0)
    else:
        with _progress_bar(batches, show=progress) as shown:
            seen = show_batches(
                prepared, shown, example_inputs, input_names=names, patience=patience
            )
    reference = convert_in_place(prepared)
    _restore_buffers(reference, state)
    attach_reference_info(reference, _info(reference, targets, seen, equalized, choice))
    return reference


def _equalize_in_place(
    exported: GraphModule,
    targets: Sequence[QuantizationTarget],
    observers: Mapping[str, str],
    calls: Sequence[ModelInputs],
) -> tuple[EqualizedLayers, ...]:
    with tracing:
        prepared = prepare_in_place(own_copy(exported), targets, observers)
    decisions = decide(exported, prepared, calls)
    apply_in_place(exported, decisions)
    return tuple(decision.summary for decision in decisions)


def _restore_buffers(reference: GraphModule, state: Mapping[str, torch.Tensor]) -> None:
    """Undo what the model wrote to its own buffers, such as a counter, while it was calibrated."""
    with torch.no_grad():
        for name, buffer in reference.named_buffers():
            before = state.get(name)
            if before is not None and (before.shape, before.dtype) == (buffer.shape, buffer.dtype):
                buffer.copy_(before)


def _refuse_training(targets: Sequence[QuantizationTarget]) -> None:
    for target in targets:
        if target.backend.is_qat:
            raise TrainingUnsupportedError(
                f"quantize() does not train, but the backend is {target.backend!r}: use "
                f"is_qat=False, or prepare_qat(), a training loop and convert()"
            )


def _calibration_batches(
    targets: Sequence[QuantizationTarget], calibration: Iterable[Any] | None, *, equalize: bool
) -> Iterable[Any] | None:
    """Return batches that are known not to be empty, or None if none are needed."""
    static = [target for target in targets if not target.backend.is_dynamic]
    if calibration is not None:
        return first_batch_checked(calibration)
    if static:
        raise CalibrationError(
            f"{static[0].backend!r} quantizes activations with fixed ranges, which it takes from "
            f"calibration data, but calibration is missing: pass calibration=[batch, ...] with "
            f"representative inputs, or use a backend with is_dynamic=True"
        )
    if equalize:
        raise CalibrationError(
            "equalize=True looks for outliers in calibration data, but calibration is missing: "
            "pass calibration=[batch, ...] with representative inputs, or leave equalize out"
        )
    return None


def _info(
    reference: GraphModule,
    targets: Sequence[QuantizationTarget],
    seen: CalibrationData,
    equalized: tuple[EqualizedLayers, ...],
    observers: Mapping[str, str],
) -> ReferenceInfo:
    return ReferenceInfo(
        targets=tuple(map(target_info_of, targets)),
        inputs=input_specs(reference),
        calibration_batches=seen.batches,
        calibration_samples=seen.samples,
        versions=current_versions(),
        equalized=equalized,
        observers=observers,
    )


@contextmanager
def _progress_bar(batches: Iterable[Any], *, show: bool) -> Iterator[Iterable[Any]]:
    if not show:
        yield batches
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield bar.track(batches, description="calibrating")
