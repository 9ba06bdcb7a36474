"""Turns a calibrated or trained module into a reference: int8 weights, quantize and dequantize around operators."""

import torch
from torch.fx import GraphModule

from versatil_core.export import input_specs, tracing
from versatil_core.float_dtype import settle_float_dtype
from versatil_core.manifest import current_versions
from versatil_core.mode_modules import restore_operators
from versatil_core.parameter_names import rename_weights, weight_names
from versatil_core.prepare import is_called, own_copy
from versatil_core.reference_info import ReferenceInfo, attach_reference_info
from versatil_core.training_record import training_record
from versatil_core.versions import check_versions


def convert(prepared: GraphModule) -> GraphModule:
    """Turn a calibrated or trained module into a reference.

    Args:
        prepared: From :func:`prepare`, after calibration, or from
            :func:`versatil_core.prepare_qat`, after training. It is not changed: training can
            go on.

    Returns:
        The reference. Its weights are int8 constants, and float weights that nothing reads any
        more are gone. That of a trained module computes what the module computes in eval mode.

    Raises:
        CalibrationError: The module from ``prepare_qat()`` has never run.
        UnsupportedVersionError: torch and torchao are not a pair that is tested.
    """
    check_versions()
    copied = own_copy(prepared)
    record = training_record(prepared)
    if record is None:
        return convert_in_place(copied)
    from versatil_core.trained_model import end_training

    end_training(copied, record)
    reference = convert_in_place(copied)
    info = ReferenceInfo(record.targets, input_specs(reference), 0, current_versions())
    attach_reference_info(reference, info)
    return reference


def convert_in_place(prepared: GraphModule) -> GraphModule:
    """Do what :func:`convert` does to the module itself, which was not trained."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    names = weight_names(prepared)
    # torchao draws random example inputs for its patterns.
    with tracing, torch.no_grad(), torch.random.fork_rng(devices=[]):
        reference: GraphModule = convert_pt2e(prepared, fold_quantize=True)
    restore_operators(reference)
    drop_unused_state(reference)
    rename_weights(reference, names)
    settle_float_dtype(reference)
    reference.requires_grad_(False)
    allow_mode_calls(reference)
    return reference


def drop_unused_state(module: GraphModule) -> None:
    """Delete the parameters and buffers that no node of the graph reads.

    Args:
        module: A reference; the float originals of its int8 weights go.
    """
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    for name, _ in [*parameters, *buffers]:
        owner, _, attribute = name.rpartition(".")
        if name not in used and not is_called(module, owner):
            delattr(module.get_submodule(owner), attribute)
    module.delete_all_unused_submodules()


def allow_mode_calls(module: GraphModule) -> None:
    """Let ``eval()`` and ``train()`` work as on any module.

    torch and torchao replace both by functions that raise. A reference computes the same in
    both modes: it was captured in eval mode.
    """
    for name in ("train", "eval"):
        module.__dict__.pop(name, None)
    module.eval()
