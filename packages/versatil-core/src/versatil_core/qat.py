"""Quantization-aware training: a float model becomes a module that rounds as int8 does, and learns to live with it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from versatil_core import _torch_compat
from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.batch_norm_folding import put_batch_norms_behind, take_batch_norms
from versatil_core.convert import allow_mode_calls, drop_unused_state
from versatil_core.errors import InputError, TrainingUnsupportedError
from versatil_core.export import check_devices, export, input_specs, model_inputs, tracing
from versatil_core.input_check import input_faults
from versatil_core.mode_modules import BatchNorm, put_batch_norms, put_dropouts
from versatil_core.prepare import prepare_in_place
from versatil_core.targets import (
    QuantizationTarget,
    Targets,
    as_targets,
    check_targets,
    common_device_types,
    target_info_of,
)
from versatil_core.training_record import (
    TrainingRecord,
    attach_training_record,
    training_record,
)
from versatil_core.versions import check_versions


def prepare_qat(
    model: torch.nn.Module,
    example_inputs: Any,
    backend_or_targets: Targets,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
) -> GraphModule:
    """Make a module for quantization-aware training of a float model, which is not changed.

    It is trained like any module: an optimizer over ``parameters()``, ``loss.backward()``,
    ``state_dict()`` and ``load_state_dict()``, ``train()`` and ``eval()``. Batch norms and
    dropouts follow the mode; everything else is as in the model's eval mode. In eval mode no
    range and no statistic changes, and the module computes what the reference of
    :func:`versatil_core.convert` will compute. The same layers become int8 as with
    :func:`versatil_core.quantize`.

    Args:
        model: A float model on the CPU, best one that is trained already.
        example_inputs: A tensor, a tuple of inputs, or a mapping of inputs by name.
        backend_or_targets: As for :func:`versatil_core.quantize`. Each backend stands for itself
            with ``is_qat=True``.
        dynamic_shapes: As for ``torch.export.export``; without it, all sizes are fixed, that of
            the batch, too.
        strict: As for ``torch.export.export``.

    Returns:
        The module, in train mode, with parameters of its own. Its ranges are measured while it
        is trained, from its first call on.

    Raises:
        TrainingUnsupportedError: A backend can't be trained for, or a weight is used in two forms.
        UnsupportedVersionError: torch or torchao is outside the tested range.
        TargetError: A target matches no module, or two overlap.
        UnsupportedDeviceError: A tensor is not on the CPU.
        ExportError: torch cannot capture the model.
        NothingQuantizedError: A target holds no operator that its backend quantizes.

    Example:
        >>> from versatil_core import convert, host_backend
        >>> model, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
        >>> trainable = prepare_qat(model, x, host_backend())
        >>> optimizer = torch.optim.SGD(trainable.parameters(), lr=0.01)
        >>> trainable(x).square().mean().backward()
        >>> optimizer.step()
        >>> reference = convert(trainable)
    """
    check_versions()
    given = as_targets(backend_or_targets)
    check_targets(model, given)
    targets = [replace(target, backend=_for_training(target.backend)) for target in given]
    device_types = common_device_types(targets)
    check_devices(model, model_inputs(example_inputs), device_types)
    # torchao draws random example inputs for its patterns.
    with tracing, torch.random.fork_rng(devices=[]):
        exported = export(
            model,
            example_inputs,
            dynamic_shapes=dynamic_shapes,
            strict=strict,
            supported_device_types=device_types,
        )
        _refuse_untied(model, exported)
        put_batch_norms(exported, model)
        taken = take_batch_norms(exported)
        prepared = prepare_in_place(exported, targets, is_qat=True)
    _settle_fakes(prepared, targets)
    put_batch_norms_behind(prepared, taken)
    put_dropouts(prepared)
    drop_unused_state(prepared)
    infos = [
        # Why the backend's options are what they are, the one that was asked for knows.
        replace(target_info_of(mine), reasons=dict(theirs.backend.option_reasons))
        for mine, theirs in zip(targets, given, strict=True)
    ]
    paths = {layer: norm.path for layer, norm in taken.items()}
    record = TrainingRecord(tuple(infos), paths, input_specs(prepared))
    return _made_trainable(prepared, record)


def freeze_batch_norm_statistics(trainable: torch.nn.Module) -> None:
    """Let batch norms normalize with their running statistics from now on, and not update them.

    Their weights and biases go on learning. It is kept in the ``state_dict()``, and
    ``train()`` does not undo it.

    Args:
        trainable: From :func:`prepare_qat`; changed in place. It may have no batch norm.

    Raises:
        TrainingUnsupportedError: It is another module.

    Example:
        >>> from versatil_core import host_backend
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        >>> trainable = prepare_qat(model, torch.randn(2, 8), host_backend())
        >>> freeze_batch_norm_statistics(trainable)
    """
    _check_trainable(trainable, "freeze_batch_norm_statistics")
    for module in trainable.modules():
        if isinstance(module, BatchNorm):
            module.statistics_frozen.fill_(True)


def freeze_ranges(trainable: torch.nn.Module) -> None:
    """Keep the ranges of activations and weights as they are from now on.

    It is kept in the ``state_dict()``, and ``train()`` does not undo it. Ranges that a dynamic
    backend measures at every call still are.

    Args:
        trainable: From :func:`prepare_qat`, after some training; changed in place.

    Raises:
        TrainingUnsupportedError: It is another module, or it has not run yet and has no ranges.

    Example:
        >>> from versatil_core import host_backend
        >>> model, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
        >>> trainable = prepare_qat(model, x, host_backend())
        >>> output = trainable(x)
        >>> freeze_ranges(trainable)
    """
    from versatil_core.trained_ranges import freeze, has_all_ranges

    _check_trainable(trainable, "freeze_ranges")
    if not has_all_ranges(trainable):
        raise TrainingUnsupportedError(
            "freeze_ranges() got a module that has not run yet, so it has no ranges to keep: "
            "train it for some steps first"
        )
    freeze(trainable)


def _for_training(backend: BasePT2EBackend) -> BasePT2EBackend:
    """Return the same backend with fake quantization."""
    if backend.is_qat:
        return backend
    options = backend_options(backend)
    if "is_qat" not in options:
        raise TrainingUnsupportedError(
            f"{backend!r} has no option is_qat, so it has no quantizer for training: use another "
            f"backend, or quantize()"
        )
    return type(backend)(**{**options, "is_qat": True})


def _refuse_untied(model: torch.nn.Module, exported: GraphModule) -> None:
    """Refuse to train a weight that layers use in two forms: as constants, these would be two weights."""
    mine = {*dict(model.named_parameters(remove_duplicate=False))}
    before = sum(parameter.numel() for parameter in model.parameters())
    after = dict(exported.named_parameters())
    if sum(parameter.numel() for parameter in after.values()) > before:
        new = [name for name in after if name not in mine]
        raise TrainingUnsupportedError(
            f"a weight is used in two forms, such as transposed in one layer and as it is in "
            f"another, and {', '.join(new)} would be trained apart from it: store the weight as "
            f"[out_features, in_features] and use torch.nn.functional.linear, or quantize()"
        )


def _settle_fakes(prepared: GraphModule, targets: Sequence[QuantizationTarget]) -> None:
    from versatil_core.trained_ranges import fakes_of, make_weights_symmetric, plain_observers

    found = plain_observers(prepared)
    if found or not any(True for _ in fakes_of(prepared)):
        backends = ", ".join(dict.fromkeys(repr(target.backend) for target in targets))
        raise TrainingUnsupportedError(
            f"a quantizer of {backends} inserts {', '.join(found) or 'nothing'} with is_qat=True, "
            f"and not only fake quantization, so training would not see the rounding: use another "
            f"backend, or quantize()"
        )
    make_weights_symmetric(prepared)


def _made_trainable(prepared: GraphModule, record: TrainingRecord) -> GraphModule:
    from versatil_core.trained_ranges import keep_ranges_in_eval

    keep_ranges_in_eval(prepared)
    attach_training_record(prepared, record)
    allow_mode_calls(prepared)
    prepared.train()
    # Otherwise a last, smaller batch fails with what torch calls a guard.
    prepared.register_forward_pre_hook(_check_inputs, with_kwargs=True)
    return prepared


def _check_inputs(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    record = training_record(module)
    leaves = _torch_compat.CallStructure.of_module(module).leaves(args, kwargs)
    if record is None or leaves is None:
        return
    for fault in input_faults(record.inputs, leaves):
        raise InputError(str(fault), input_name=fault.input_name)


def _check_trainable(module: torch.nn.Module, function: str) -> None:
    # A wrapper, such as one for several processes, has it inside.
    if not any(training_record(each) for each in module.modules()):
        raise TrainingUnsupportedError(
            f"{function}() takes a module from prepare_qat(), got {type(module).__name__}"
        )
