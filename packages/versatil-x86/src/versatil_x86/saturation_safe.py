"""Makes a model that was quantized for CPUs with VNNI exact on those without."""

from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from versatil_core.convert import drop_unused_state
from versatil_core.errors import LoweringError
from versatil_core.lower import lowered_copy
from versatil_core.prepare import own_copy
from versatil_core.reference_info import ReferenceInfo, attach_reference_info, find_reference_info
from versatil_passes.graph_queries import constant_of
from versatil_x86.cpu_features import CPUFeatures
from versatil_x86.int8_weight import QuantizedWeight, along_channels, put_int8_weight
from versatil_x86.pair_safe_weights import (
    PAIRS_WITHOUT_VNNI,
    best_of,
    candidates,
    weight_errors,
)
from versatil_x86.rules import x86_lowering_rules
from versatil_x86.saturation import BACKEND_NAME

_WITHOUT_VNNI = CPUFeatures(avx2=True)


def make_saturation_safe(reference: GraphModule) -> GraphModule:
    """Rescale the weights of a quantized model so that it is exact on CPUs without VNNI, too.

    Only the output channels that hold a pair of weights that may saturate change: their scale grows until none can.
    Activations keep their scales, so no calibration data is needed. Quantizing again with ``saturation="safe"`` is
    a little more accurate, since it rounds once and sees the calibration data.

    Args:
        reference: What :func:`versatil_core.quantize` or :func:`versatil_core.load` returned, or a graph from
            torchao's ``convert_pt2e``. It is not changed.

    Returns:
        A new reference, with results of its own, which differ from those of ``reference`` by the rounding of weights.

    Raises:
        LoweringError: ``reference`` is no graph module, is lowered already, or has no int8 layer.

    Example:
        >>> from versatil_core import quantize
        >>> from versatil_x86 import X86InductorBackend
        >>> model, x = torch.nn.Linear(64, 8), torch.rand(4, 64)
        >>> _ = torch.nn.init.uniform_(model.weight, 0.5, 1.0)
        >>> reference = quantize(model, x, X86InductorBackend(), calibration=[x])
        >>> bool((make_saturation_safe(reference)(x) - reference(x)).abs().max() < 0.1)
        True
    """
    _, record = lowered_copy(reference, x86_lowering_rules(_WITHOUT_VNNI))
    # An embedding adds nothing up.
    layers = [op for op in record.lowered if op.input_quant_max is not None]
    if not layers:
        raise LoweringError(
            "this graph holds no int8 layer whose weights could be rescaled: pass what versatil_core.quantize() or "
            "torchao's convert_pt2e returned"
        )
    safe = own_copy(reference)
    by_name = {node.name: node for node in safe.graph.nodes}
    activation_max: dict[Node, int] = {}
    for op in layers:
        dequantize = by_name[op.node].args[1]
        assert isinstance(dequantize, Node)
        assert op.input_quant_max is not None
        if op.may_saturate:  # layers that share a weight share the strictest bound
            earlier = activation_max.get(dequantize, 0)
            activation_max[dequantize] = max(earlier, op.input_quant_max)
    for dequantize, largest in activation_max.items():
        _rescale(safe, dequantize, largest)
    drop_unused_state(safe)
    safe.recompile()
    info = find_reference_info(reference)
    if info is not None and activation_max:
        attach_reference_info(safe, _with_safe_targets(info))
    return safe


def _rescale(model: GraphModule, dequantize: Node, activation_max: int) -> None:
    weight, scale = dequantize.args[:2]
    values, scales = constant_of(weight), constant_of(scale)
    assert values is not None
    assert isinstance(weight, Node)
    if scales is None:  # one number for the whole weight
        scales = torch.full((len(values),), float(scale), dtype=torch.float32)  # type: ignore[arg-type]
    old = QuantizedWeight(values, scales)
    wanted = old.dequantize()
    options = candidates(wanted, activation_max)
    new = best_of(options, weight_errors(wanted, options))
    is_over = PAIRS_WITHOUT_VNNI.largest_sums(values) > PAIRS_WITHOUT_VNNI.limit(activation_max)
    changed = QuantizedWeight(
        torch.where(along_channels(is_over, values), new.values, old.values),
        torch.where(is_over, new.scale, old.scale),
    )
    out_dtype = dequantize.kwargs.get("out_dtype")
    assert out_dtype is None or isinstance(out_dtype, torch.dtype)
    constants = [node for node in dequantize.all_input_nodes if node.op == "get_attr"]
    put_int8_weight(model, dequantize, changed, str(weight.target), out_dtype)
    for node in constants:
        if not node.users:  # otherwise the old weight would be kept, and saved
            model.graph.erase_node(node)


def _with_safe_targets(info: ReferenceInfo) -> ReferenceInfo:
    reason = "make_saturation_safe rescaled the weights after quantizing"
    targets = tuple(
        replace(
            target,
            options={**target.options, "saturation": "safe"},
            reasons={**target.reasons, "saturation": reason},
        )
        if target.backend == BACKEND_NAME and not target.options.get("reduce_range")
        else target
        for target in info.targets
    )
    return replace(info, targets=targets)
