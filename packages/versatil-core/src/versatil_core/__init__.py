"""Turns float PyTorch models into exact int8 models for CPUs."""

from versatil_core.__about__ import __version__
from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.discovery import (
    BackendEntry,
    create_backend,
    host_backend,
    installed_backends,
    load_backend,
)
from versatil_core.inductor_settings import InductorSettings, PinnedSetting
from versatil_core.quantize import quantize
from versatil_core.targets import QuantizationTarget
