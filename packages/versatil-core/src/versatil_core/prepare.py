"""Inserts observers, or fake quantization, where backends want to quantize."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch.fx import GraphModule

from versatil_core import _torch_compat
from versatil_core.annotations import rename_inputs
from versatil_core.batch_norm_folding import fold_for_inference
from versatil_core.float_dtype import ask_for_float_dtype, common_float_dtype
from versatil_core.mode_modules import put_batch_norms
from versatil_core.targets import QuantizationTarget, Targets, as_targets
from versatil_core.versions import check_versions


def prepare(exported: GraphModule, backend_or_targets: Targets) -> GraphModule:
    """Insert observers where the backends want to quantize.

    Args:
        exported: From :func:`versatil_core.export.export`; it is not changed.
        backend_or_targets: As for :func:`quantize`.

    Returns:
        A module for :func:`versatil_core.calibration.calibrate`.

    Raises:
        NothingQuantizedError: A target holds no operator that its backend quantizes.
        UnsupportedVersionError: torch and torchao are not a pair that is tested.
    """
    check_versions()
    return prepare_in_place(own_copy(exported), as_targets(backend_or_targets))


def prepare_in_place(
    exported: GraphModule,
    targets: Sequence[QuantizationTarget],
    observers: Mapping[str, str] = MappingProxyType({}),
    *,
    is_qat: bool = False,
) -> GraphModule:
    """Do what :func:`prepare` does to the module itself, or insert fake quantization."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e

    from versatil_core.target_quantizer import (
        check_something_annotated,
        give_own_constants,
        target_quantizer,
    )

    if not is_qat:
        put_batch_norms(exported)
        fold_for_inference(exported)
    for target in targets[1:]:
        give_own_constants(exported, target)
    insert = prepare_qat_pt2e if is_qat else prepare_pt2e
    prepared: GraphModule = insert(exported, target_quantizer(targets, observers))
    for target in targets:
        check_something_annotated(prepared, target)
    ask_for_float_dtype(prepared, common_float_dtype(targets))
    return prepared


def own_copy(module: GraphModule) -> GraphModule:
    """Copy a graph and the buffers that running it may write to; parameters are shared."""
    copied = _torch_compat.copy_graph_module(module)
    for name, buffer in [*copied.named_buffers()]:
        owner, _, attribute = name.rpartition(".")
        if not is_called(copied, owner):
            setattr(copied.get_submodule(owner), attribute, buffer.clone())
    rename_inputs(copied.graph, dict(zip(module.graph.nodes, copied.graph.nodes, strict=True)))
    return copied


def is_called(module: GraphModule, path: str) -> bool:
    """Whether a node calls the module at a path, or one that it is in."""
    called = (str(node.target) for node in module.graph.nodes if node.op == "call_module")
    return any(path == target or path.startswith(target + ".") for target in called)
