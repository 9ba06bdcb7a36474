"""int8 PyTorch models on x86 CPUs."""

from versatil_x86.__about__ import __version__
from versatil_x86.backend import X86InductorBackend
from versatil_x86.cpu_features import CPUFeatures
from versatil_x86.saturation_safe import make_saturation_safe

__all__ = ["CPUFeatures", "X86InductorBackend", "__version__", "make_saturation_safe"]
