"""What int8 on Arm can do: everything that is a product of two int8 matrices."""

import torch

from versatil_passes.lowering_rules import LoweringRules

MACHINE_TYPES = ("aarch64",)  # Linux' name; elsewhere torch has no Arm Compute Library
ARM_OPS = frozenset({"linear", "conv1d", "conv2d"})
# The columns of one image, for the kernel of a convolution. ResNet-50's largest take 1.8 MB.
COLUMNS_BYTES_MAX = 64 * 2**20


def arm_lowering_rules(columns_bytes_max: int = COLUMNS_BYTES_MAX) -> LoweringRules:
    """Return what the int8 lowering may do on an Arm CPU.

    oneDNN reaches the Arm Compute Library's int8 product (``lowp_gemm:acl``) for int8 activations and one weight
    scale only; for everything else it takes generic or reference code. So every layer becomes such a product, with
    the rest element by element around it, where Inductor fuses it.

    Args:
        columns_bytes_max: Convolutions whose columns take more bytes for each image stay float.
    """
    return LoweringRules(
        machine_types=MACHINE_TYPES,
        ops=ARM_OPS,
        activation_dtypes=(torch.int8, torch.uint8),
        weight_granularities=frozenset({"per_channel", "per_tensor"}),
        dynamic_ops=ARM_OPS,
        # Inductor fuses whatever else follows the product into one loop.
        post_ops={op: frozenset({"relu"}) for op in ARM_OPS},
        residual_post_ops={},
        allow_int8_output=False,
        kernels="gemm",
        columns_bytes_max=columns_bytes_max,
        kernel_class="lowp_gemm:acl",
    )
