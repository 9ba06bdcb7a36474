"""Marks what to quantize for Arm in an exported graph."""

from typing import TYPE_CHECKING

from torch.fx import Node

from versatil_arm.quantization_config import get_arm_inductor_quantization_config
from versatil_arm.rules import ARM_OPS
from versatil_core.layer_quantizer import LayerQuantizer
from versatil_passes.float_layers import FLOAT_LAYERS, conv_groups

if TYPE_CHECKING:
    from versatil_arm.backend import ArmInductorBackend


def arm_quantizer(backend: "ArmInductorBackend", module_path: str = "") -> LayerQuantizer:
    """Return the quantizer of a backend.

    Args:
        backend: Its options are the recipe.
        module_path: Annotate only inside this module; ``""`` is the whole model.
    """
    config = get_arm_inductor_quantization_config(
        is_qat=backend.is_qat,
        is_dynamic=backend.is_dynamic,
        is_per_channel=backend.is_per_channel,
        activation_dtype=backend.activation_dtype,
    )
    return LayerQuantizer(
        config,
        module_path,
        is_dynamic=backend.is_dynamic,
        has_kernel=_is_one_matrix,
        kernels_write_int8=False,
    )


def _is_one_matrix(layer: Node) -> bool:
    """Whether a layer is a product of two matrices that ``rules.py`` admits; a group is a small one."""
    return FLOAT_LAYERS[layer.target] in ARM_OPS and conv_groups(layer) == 1
