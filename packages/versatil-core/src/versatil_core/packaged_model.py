"""Loads a package and runs it: native code that nothing checks, behind checks of file, machine and inputs."""

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from versatil_core._torch_compat import CallStructure, NativeModel
from versatil_core.backend import BasePT2EBackend
from versatil_core.discovery import create_backend
from versatil_core.errors import (
    InputError,
    ModelFileError,
    PackagingError,
    UnsupportedHostError,
)
from versatil_core.host import INT8_FEATURES, read_host
from versatil_core.input_check import input_faults
from versatil_core.lower import check_host
from versatil_core.manifest import (
    PACKAGE,
    Manifest,
    PackageInfo,
    check_kind,
    check_torch_of_package,
    parse_manifest,
)
from versatil_core.model_file import read_model_file
from versatil_core.reference_info import InputSpec
from versatil_core.versions import check_versions

_log = logging.getLogger(__name__)
# The system cannot unload code with thread-local variables that a living thread has used, and what
# torch generates has one. So the same code is loaded once, however often its file is.
_loaded: dict[bytes, NativeModel] = {}
_loading = threading.Lock()


class PackagedModel(torch.nn.Module):
    """A model that was compiled ahead of time, in this process.

    Each call checks the inputs first; then native code runs. Input tensors are never written to,
    results carry no gradients. It has no parameters, ``train()`` and ``eval()`` change nothing,
    and copies share the native code. Any thread may call it; calls run one after another.

    Attributes:
        manifest: What the file says about itself.
    """

    def __init__(self, native: NativeModel, manifest: Manifest) -> None:
        """Wrap what :func:`load_package` has loaded."""
        super().__init__()
        self.manifest = manifest
        self._native = native

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            InputError: An input does not fit what the model was exported with.
        """
        leaves = checked_leaves(self._native.structure, self.manifest.info.inputs, args, kwargs)
        specs = self.manifest.info.inputs
        tensors = [
            _plain(spec, leaf)
            for spec, leaf in zip(specs, leaves, strict=True)
            if spec.shape is not None
        ]
        with torch.no_grad():
            return self._native(tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackagedModel":
        copied = PackagedModel(self._native, self.manifest)
        copied.train(self.training)
        memo[id(self)] = copied
        return copied

    def __copy__(self) -> "PackagedModel":
        return self.__deepcopy__({})

    def __reduce__(self) -> NoReturn:
        raise PackagingError(
            "a packaged model is native code of this process, which cannot be pickled: send the "
            "path of its file, and call versatil_core.load_package(path) there"
        )


def load_package(path: str | os.PathLike[str]) -> PackagedModel:
    """Load a package, without compiling anything.

    A package is native code: **load only what you trust**. That the file is whole, and made for
    this torch and this CPU, is checked before any of it runs; what the code does is not. It stays in
    memory until the process ends; loading the same file again takes no more.

    Args:
        path: A file from :func:`versatil_core.package`.

    Returns:
        The model.

    Raises:
        ModelFileError: The file is missing, damaged, changed, of another format version, a portable
            file, or no model file.
        UnsupportedVersionError: Another torch made it.
        BackendNotFoundError: The backend that made it is not installed.
        UnsupportedHostError: This CPU is of another kind, or lacks instructions that it uses.
    """
    check_versions()
    file = read_model_file(path)
    manifest = parse_manifest(path, file.manifest)
    check_kind(path, manifest, PACKAGE)
    check_torch_of_package(path, manifest)
    assert manifest.package is not None
    backend = create_backend(manifest.package.backend.backend, manifest.package.backend.options)
    check_host(backend)
    _check_cpu(path, manifest.package, backend)
    return PackagedModel(load_native(path, file.members, manifest.info.inputs), manifest)


def load_native(
    path: str | os.PathLike[str], members: Mapping[str, bytes], inputs: Sequence[InputSpec]
) -> NativeModel:
    """Load the native code of a package.

    Args:
        path: For messages.
        members: Of the archive, checked.
        inputs: What the code takes.

    Raises:
        ModelFileError: There is no code, the system cannot load it, or it takes other inputs.
    """
    libraries = [name for name in members if name.endswith(".so")]
    if len(libraries) != 1:
        raise ModelFileError(
            f"{path} holds {len(libraries)} shared libraries instead of one. Package the model anew",
            path=str(path),
        )
    native = _native(path, libraries[0], members)
    if native.structure.count != len(inputs):
        raise ModelFileError(
            f"{path} holds code for {native.structure.count} inputs, but its manifest describes "
            f"{len(inputs)}. Package the model anew",
            path=str(path),
        )
    return native


def _native(
    path: str | os.PathLike[str], library: str, members: Mapping[str, bytes]
) -> NativeModel:
    # Next to the library, torch looks for the operators that it has no direct call for.
    files = {name: data for name, data in members.items() if name.endswith((".so", ".json"))}
    digest = hashlib.sha256()
    for data in files.values():
        digest.update(data)
    key = digest.digest()
    with _loading:
        if key not in _loaded:
            # A copy of what was checked: the file itself may be another by now.
            with tempfile.TemporaryDirectory(prefix="versatil_") as folder:
                for name, data in files.items():
                    Path(folder, Path(name).name).write_bytes(data)
                _loaded[key] = _linked(path, Path(folder, Path(library).name))
        return _loaded[key]


def _linked(path: str | os.PathLike[str], library: Path) -> NativeModel:
    try:
        return NativeModel(str(library))
    # The system's linker and pytree have no common error.
    except Exception as error:
        raise ModelFileError(
            f"{path} cannot be loaded: {type(error).__name__}: {str(error).rstrip('.')}. If it names a "
            f"class that the model takes or gives, import that class first; if {library.parent.parent} "
            f"is on a file system that forbids execution, set TMPDIR to another folder",
            path=str(path),
        ) from error


def checked_leaves(
    structure: CallStructure,
    specs: Sequence[InputSpec],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Any]:
    """Flatten the inputs of a call, in the order of ``specs``.

    Raises:
        InputError: They nest otherwise, or one does not fit.
    """
    leaves = structure.leaves(args, kwargs)
    if leaves is None:
        names = ", ".join(spec.name for spec in specs)
        given = f"{len(args)} by position" + (f" and by name {', '.join(kwargs)}" if kwargs else "")
        raise InputError(
            f"the model takes {len(specs)} inputs ({names}), {structure}, nested as when it was "
            f"quantized; got {given}"
        )
    for fault in input_faults(specs, leaves):
        raise InputError(str(fault), input_name=fault.input_name)
    return leaves


def _plain(spec: InputSpec, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory layout that the code was made for."""
    # What functorch wraps, and sparse tensors, have no storage; that of fake ones is elsewhere.
    with contextlib.suppress(RuntimeError):
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if plain.untyped_storage().device.type == "cpu":
            strides = _strides(plain.shape)
            # Of a dimension of size 1, "contiguous" allows any stride.
            return plain if plain.stride() == strides else plain.as_strided(plain.shape, strides)
    raise InputError(
        f"input {spec.name}: a {type(tensor).__name__} ({tensor.layout}) without memory of its own, "
        f"such as sparse and fake tensors, is no input of native code: pass a plain tensor, and call "
        f"the model outside of transforms and of tracing",
        input_name=spec.name,
    )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def _check_cpu(
    path: str | os.PathLike[str], package: PackageInfo, backend: BasePT2EBackend
) -> None:
    host = read_host()
    if host.machine != package.machine:
        raise UnsupportedHostError(
            f"{path} is for {package.machine}, and this machine is {host.machine}: load() the portable "
            f"file here and package() it anew",
            backend=backend.name,
            machine=host.machine,
            machine_types=(package.machine,),
        )
    here = {*backend.cpu_features}
    if missing := _int8_first({*package.cpu_features} - here):
        limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
        but = f", limited by ONEDNN_MAX_CPU_ISA={limit}," if limit else ""
        has = ", ".join(name for name in INT8_FEATURES if name in here)
        raise UnsupportedHostError(
            f"{path} needs {', '.join(missing)}; this CPU{but} has {has or 'no int8 instructions'}. It "
            f"was packaged on {package.cpu}: load() the portable file here and package() it anew",
            backend=backend.name,
            machine=host.machine,
            machine_types=(package.machine,),
            missing_features=missing,
        )
    if unused := _int8_first(here.intersection(INT8_FEATURES) - {*package.cpu_features}):
        _log.warning(
            "%s was packaged on a CPU without %s, which this one has: it works, and packaged here it "
            "may be faster",
            path,
            ", ".join(unused),
        )


def _int8_first(features: Iterable[str]) -> list[str]:
    return sorted(features, key=lambda name: (name not in INT8_FEATURES, name))
