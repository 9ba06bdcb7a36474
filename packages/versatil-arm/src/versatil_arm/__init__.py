"""int8 PyTorch models on Arm CPUs."""

from versatil_arm.__about__ import __version__
from versatil_arm.backend import ArmInductorBackend
from versatil_arm.cpu_features import CPUFeatures
from versatil_arm.quantization_config import get_arm_inductor_quantization_config

__all__ = [
    "ArmInductorBackend",
    "CPUFeatures",
    "__version__",
    "get_arm_inductor_quantization_config",
]
