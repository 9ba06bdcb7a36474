"""What oneDNN's int8 kernels on x86 can do."""

import torch

from versatil_passes.lowering_rules import LoweringRules
from versatil_x86._torch_compat import has_dynamic_conv_kernel
from versatil_x86.cpu_features import CPUFeatures
from versatil_x86.pair_safe_weights import PAIRS_WITHOUT_VNNI

MACHINE_TYPES = ("x86_64", "amd64")


def x86_lowering_rules(features: CPUFeatures) -> LoweringRules:
    """Return what the int8 lowering may do on an x86 CPU.

    The forms are those that ``onednn::qlinear_pointwise`` and ``onednn::qconv_pointwise`` accept;
    each was run against the float computation.

    Args:
        features: The CPU.
    """
    return LoweringRules(
        machine_types=MACHINE_TYPES,
        ops=frozenset({"linear", "conv1d", "conv2d", "conv3d"}),
        # The kernels refuse s8 activations.
        activation_dtypes=(torch.uint8,),
        weight_granularities=frozenset({"per_channel", "per_tensor"}),
        dynamic_ops=frozenset(
            {"linear", "conv1d", "conv2d", "conv3d"} if has_dynamic_conv_kernel() else {"linear"}
        ),
        post_ops={
            "linear": frozenset({"relu", "hardtanh", "hardswish", "silu", "gelu"}),
            "conv1d": frozenset({"relu"}),
            # No gelu: the kernel for convolutions refuses it.
            "conv2d": frozenset({"relu", "hardtanh", "hardswish", "silu"}),
            "conv3d": frozenset({"relu"}),
        },
        residual_post_ops={
            "linear": frozenset({"relu"}),
            "conv2d": frozenset({"relu"}),
        },
        allow_int8_output=True,
        # On CPUs without bfloat16 instructions, too.
        allow_bfloat16_output=True,
        saturating_pairs=None if features.has_vnni else PAIRS_WITHOUT_VNNI,
    )
