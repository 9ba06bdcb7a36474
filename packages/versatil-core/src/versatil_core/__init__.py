"""Turns float PyTorch models into exact int8 models for CPUs.

The path: :func:`quantize` a float model into a reference, :func:`compile` the reference into a
fast module, :func:`audit` what runs as int8,
:func:`save` and :func:`load` the reference.
"""

from versatil_core.__about__ import __version__
from versatil_core.audit import Audit, LayerAudit, audit
from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.calibration import calibrate
from versatil_core.compile import CompiledModel, compile, dynamo_backend  # noqa: A004 -- the verb
from versatil_core.convert import convert
from versatil_core.discovery import (
    BackendEntry,
    create_backend,
    host_backend,
    installed_backends,
    load_backend,
)
from versatil_core.errors import (
    AutocastError,
    BackendConflictError,
    BackendLoadError,
    BackendNotFoundError,
    BackendOptionError,
    CalibrationError,
    ExportError,
    InputError,
    LoweringError,
    ModelFileError,
    NothingQuantizedError,
    PackagingError,
    ReportError,
    TargetError,
    TrainingUnsupportedError,
    UnsupportedDeviceError,
    UnsupportedHostError,
    UnsupportedVersionError,
    VersatilError,
)
from versatil_core.exactness import check_exactness
from versatil_core.exactness_report import ExactnessReport, InexactError, OpExactness
from versatil_core.export import export
from versatil_core.float_dtype import with_float_dtype
from versatil_core.inductor_settings import InductorSettings, PinnedSetting
from versatil_core.lower import lower
from versatil_core.manifest import Manifest, read_manifest
from versatil_core.package import package
from versatil_core.packaged_model import PackagedModel, load_package
from versatil_core.prepare import prepare
from versatil_core.qat import freeze_batch_norm_statistics, freeze_ranges, prepare_qat
from versatil_core.quantize import quantize
from versatil_core.reference_info import EqualizedLayers, ReferenceInfo, reference_info
from versatil_core.report import ReportStoppedError, report
from versatil_core.report_gates import gates_of
from versatil_core.report_result import Report, Verdict, VerdictCode
from versatil_core.saturation import SaturationWarning
from versatil_core.saved_reference import load, save
from versatil_core.signal_to_noise import sqnr_db
from versatil_core.targets import QuantizationTarget
from versatil_core.torchao_guard import load_quantizer_module

__all__ = [
    "Audit",
    "AutocastError",
    "BackendConflictError",
    "BackendEntry",
    "BackendLoadError",
    "BackendNotFoundError",
    "BackendOptionError",
    "BasePT2EBackend",
    "CalibrationError",
    "CompiledModel",
    "EqualizedLayers",
    "ExactnessReport",
    "ExportError",
    "InductorSettings",
    "InexactError",
    "InputError",
    "LayerAudit",
    "LoweringError",
    "Manifest",
    "ModelFileError",
    "NothingQuantizedError",
    "OpExactness",
    "PackagedModel",
    "PackagingError",
    "PinnedSetting",
    "QuantizationTarget",
    "ReferenceInfo",
    "Report",
    "ReportError",
    "ReportStoppedError",
    "SaturationWarning",
    "TargetError",
    "TrainingUnsupportedError",
    "UnsupportedDeviceError",
    "UnsupportedHostError",
    "UnsupportedVersionError",
    "Verdict",
    "VerdictCode",
    "VersatilError",
    "__version__",
    "audit",
    "backend_options",
    "calibrate",
    "check_exactness",
    "compile",
    "convert",
    "create_backend",
    "dynamo_backend",
    "export",
    "freeze_batch_norm_statistics",
    "freeze_ranges",
    "gates_of",
    "host_backend",
    "installed_backends",
    "load",
    "load_backend",
    "load_package",
    "load_quantizer_module",
    "lower",
    "package",
    "prepare",
    "prepare_qat",
    "quantize",
    "read_manifest",
    "reference_info",
    "report",
    "save",
    "sqnr_db",
    "with_float_dtype",
]
