"""What versatil_core raises; all of it derives from :class:`versatil_passes.VersatilError`.

::

    VersatilError
    ├── BackendNotFoundError     (LookupError)   no installed package registers this backend
    ├── BackendConflictError                     several distributions register one name
    ├── BackendLoadError         (ImportError)   a registered backend cannot be imported or used
    ├── BackendOptionError       (ValueError)    a backend has no such option, or not this value of it
    ├── UnsupportedDeviceError   (ValueError)    a tensor is not on the CPU
    ├── UnsupportedHostError     (RuntimeError)  this machine does not have the backend's kernels
    ├── TargetError              (ValueError)    a module path matches nothing, or two overlap
    ├── CalibrationError         (ValueError)    calibration is missing, empty or does not fit
    ├── AutocastError            (RuntimeError)  torch.autocast is on where it cannot be followed
    ├── TrainingUnsupportedError (NotImplementedError)  what can't be trained, or does nothing else
    ├── InputError               (ValueError)    an input does not fit the exported model
    ├── ExportError              (RuntimeError)  torch.export could not capture the model
    ├── NothingQuantizedError    (RuntimeError)  no operator was there to quantize
    ├── ModelFileError           (ValueError)    a file is no model file, damaged, or can't be written
    ├── PackagingError           (RuntimeError)  a reference could not be packaged
    ├── ReportError              (RuntimeError)  what a report is made of could not be measured
    └── LoweringError            (RuntimeError)  a reference could not be lowered

``UnsupportedVersionError`` is that of versatil_passes; here it also tells of torchao.

Each also derives from the built-in error that a caller would catch, and keeps as attributes
the values that its message shows.
"""

from collections.abc import Sequence

from versatil_passes.errors import UnsupportedVersionError, VersatilError

__all__ = [
    "AutocastError",
    "BackendConflictError",
    "BackendLoadError",
    "BackendNotFoundError",
    "BackendOptionError",
    "CalibrationError",
    "ExportError",
    "InputError",
    "LoweringError",
    "ModelFileError",
    "NothingQuantizedError",
    "PackagingError",
    "ReportError",
    "TargetError",
    "TrainingUnsupportedError",
    "UnsupportedDeviceError",
    "UnsupportedHostError",
    "UnsupportedVersionError",
    "VersatilError",
]


class AutocastError(VersatilError, RuntimeError):
    """``torch.autocast`` is on where an int8 model cannot follow it."""


class BackendNotFoundError(VersatilError, LookupError):
    """No installed distribution registers the backend.

    Attributes:
        name: The backend asked for; None if any backend for this machine would have done.
        installed: Names of the backends that are installed.
    """

    def __init__(self, message: str, *, name: str | None, installed: Sequence[str]) -> None:
        """Keep the name and what is installed."""
        super().__init__(message)
        self.name = name
        self.installed = tuple(installed)


class BackendConflictError(VersatilError):
    """Several distributions register a backend under one name.

    Attributes:
        name: The contested backend name.
        distributions: The distributions that register it, as ``"name version"``.
    """

    def __init__(self, message: str, *, name: str, distributions: Sequence[str]) -> None:
        """Keep the contested name and who registers it."""
        super().__init__(message)
        self.name = name
        self.distributions = tuple(distributions)


class BackendLoadError(VersatilError, ImportError):
    """A backend is registered but cannot be imported, or is not what it should be.

    Attributes:
        backend: The backend's registered name. (``name`` is ImportError's own attribute.)
        distribution: The distribution that registers it.
        version: That distribution's version.
    """

    def __init__(self, message: str, *, backend: str, distribution: str, version: str) -> None:
        """Keep which backend of which distribution failed."""
        super().__init__(message)
        self.backend = backend
        self.distribution = distribution
        self.version = version


class BackendOptionError(VersatilError, ValueError):
    """A backend has no such option, or not this value of it, or the value contradicts another option.

    Attributes:
        backend: Name of the backend.
        option: The option.
        value: What was asked for.
        remedy: What to ask for instead.
    """

    def __init__(self, backend: str, option: str, value: object, remedy: str) -> None:
        """Keep what was asked for, and what to ask for instead."""
        super().__init__(f"backend {backend!r}: {option}={value!r} is not possible: {remedy}")
        self.backend = backend
        self.option = option
        self.value = value
        self.remedy = remedy


class UnsupportedDeviceError(VersatilError, ValueError):
    """A parameter, buffer or input is on a device that the backend does not serve.

    Attributes:
        device_type: The device type found, for instance ``"cuda"``.
        supported: The device types that the backend serves.
    """

    def __init__(self, message: str, *, device_type: str, supported: Sequence[str]) -> None:
        """Keep the device found and those served."""
        super().__init__(message)
        self.device_type = device_type
        self.supported = tuple(supported)


class UnsupportedHostError(VersatilError, RuntimeError):
    """This machine does not have the kernels of the backend.

    Attributes:
        backend: The backend's name.
        machine: ``platform.machine()`` of this host, lower case.
        machine_types: The machines that have the kernels.
        missing_features: Instruction sets that a packaged model needs and this CPU lacks.
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str,
        machine: str,
        machine_types: Sequence[str],
        missing_features: Sequence[str] = (),
    ) -> None:
        """Keep the backend, this machine, the machines it would run on, and what this one lacks."""
        super().__init__(message)
        self.backend = backend
        self.machine = machine
        self.machine_types = tuple(machine_types)
        self.missing_features = tuple(missing_features)


class TargetError(VersatilError, ValueError):
    """The module paths of the quantization targets do not fit the model or one another.

    Attributes:
        module_paths: The paths at fault.
        suggestions: Existing module paths that resemble them, best first.
    """

    def __init__(
        self, message: str, *, module_paths: Sequence[str], suggestions: Sequence[str] = ()
    ) -> None:
        """Keep the paths at fault and what may have been meant."""
        super().__init__(message)
        self.module_paths = tuple(module_paths)
        self.suggestions = tuple(suggestions)


class CalibrationError(VersatilError, ValueError):
    """Calibration is missing or empty, or one of its batches does not fit the model.

    Attributes:
        batch_index: Which batch, counted from 0; None if the fault is not in a batch.
        input_name: Which input of the model; None if the fault is not in one input.
    """

    def __init__(
        self, message: str, *, batch_index: int | None = None, input_name: str | None = None
    ) -> None:
        """Keep where the fault is."""
        super().__init__(message)
        self.batch_index = batch_index
        self.input_name = input_name


class InputError(VersatilError, ValueError):
    """An input of a compiled model does not fit what the model was exported with.

    Attributes:
        input_name: Which input of the model; None if their number is wrong.
    """

    def __init__(self, message: str, *, input_name: str | None = None) -> None:
        """Keep which input it is."""
        super().__init__(message)
        self.input_name = input_name


class TrainingUnsupportedError(VersatilError, NotImplementedError):
    """Quantization-aware training was asked of what does not train, or inference of what does."""


class ExportError(VersatilError, RuntimeError):
    """``torch.export`` could not capture the model; the cause is torch's own error."""


class NothingQuantizedError(VersatilError, RuntimeError):
    """A quantizer found no operator to quantize.

    Attributes:
        module_path: The module that was searched, ``""`` for the whole model.
        looked_for: The operators that the quantizer looked for.
        found: The operators that are there instead.
    """

    def __init__(
        self, message: str, *, module_path: str, looked_for: Sequence[str], found: Sequence[str]
    ) -> None:
        """Keep where the quantizer looked, for what, and what is there."""
        super().__init__(message)
        self.module_path = module_path
        self.looked_for = tuple(looked_for)
        self.found = tuple(found)


class ModelFileError(VersatilError, ValueError):
    """A file cannot be written, or is missing, damaged or not a model file of the kind asked for.

    Attributes:
        path: The file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        """Keep the path."""
        super().__init__(message)
        self.path = path


class PackagingError(VersatilError, RuntimeError):
    """A reference could not be packaged, or the package is not what it should be."""


class ReportError(VersatilError, RuntimeError):
    """What a report is made of could not be measured: a metric or the float model failed, or does not fit."""


class LoweringError(VersatilError, RuntimeError):
    """A reference could not be lowered to int8 kernels."""
