"""Compiles a reference ahead of time, into a file that runs where there is no compiler."""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from versatil_core import _torch_compat
from versatil_core.audit import Audit, audit
from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.doctor import find_compiler
from versatil_core.errors import ModelFileError, PackagingError, VersatilError
from versatil_core.export import model_inputs, tracing
from versatil_core.float_dtype import as_compiled
from versatil_core.host import read_host
from versatil_core.int8_calls import int8_calls
from versatil_core.lower import check_host
from versatil_core.manifest import (
    Manifest,
    PackageInfo,
    manifest_values,
    parse_manifest,
    read_manifest,
)
from versatil_core.model_file import write_model_file
from versatil_core.packaged_model import PackagedModel, checked_leaves, load_native
from versatil_core.reexport import reexport
from versatil_core.reference_info import ReferenceInfo, TargetInfo, reference_info
from versatil_core.signal_to_noise import sqnr_db
from versatil_core.versions import check_versions
from versatil_passes.graph_queries import is_written

_log = logging.getLogger(__name__)
# Inductor rounds a value between two int8 steps otherwise now and then; what is farther from the
# reference than this has another cause.
_DOUBTFUL_DB = 15.0
_MAX_REASON = 2000


def package(
    reference: GraphModule,
    example_inputs: Any,
    backend: BasePT2EBackend,
    path: str | os.PathLike[str],
) -> Manifest:
    """Compile a reference ahead of time, and write it into a file for this kind of CPU.

    :func:`versatil_core.load_package` loads it without a compiler. It takes every size that the reference
    takes. Nothing global changes, as in :func:`versatil_core.compile`.

    What was made is verified before it is written: the code calls as many int8 kernels as the
    audit promises; run on the example inputs, it gives results of the reference's structure, shapes and
    dtypes, and finite where the reference's are. Results far from the reference's are logged as a warning.

    Args:
        reference: What :func:`versatil_core.quantize` or :func:`versatil_core.load` returned.
        example_inputs: A tensor, a tuple of inputs, or a mapping of inputs by name; of any size that the
            reference takes.
        backend: The hardware to compile for: that of this machine.
        path: The file; ``.pt2`` is customary. Its folder must exist.

    Returns:
        What the file says about itself.

    Raises:
        PackagingError: There is no C++ compiler, AOTInductor fails, no layer runs as int8, or what was
            made is not what the audit or the reference says.
        InputError: ``example_inputs`` do not fit the reference.
        UnsupportedHostError: This machine does not have the backend's kernels.
        ModelFileError: ``path`` cannot be written, or ``reference`` was not made by versatil.
        LoweringError: ``reference`` is lowered already.
        UnsupportedVersionError: torch or torchao is outside the tested range.
        AutocastError: Autocast is on, with another dtype than bfloat16.
    """
    check_versions()
    reference = as_compiled(reference, backend)
    info = reference_info(reference)
    check_host(backend)
    inputs = model_inputs(example_inputs)
    structure = _torch_compat.CallStructure.of_module(reference)
    checked_leaves(structure, info.inputs, inputs.args, inputs.kwargs)
    _check_path(path)
    _check_compiler()
    _check_limit(backend)
    # What torch keeps while it traces belongs to the whole process.
    with tracing, _torch_compat.compile_lock():
        audited = audit(reference, backend)
        _check_int8(audited)
        members = _compiled(reference, info, backend)
    calls = _check_calls(members, audited)
    values = manifest_values(info, _package_info(backend, audited, calls))
    native = load_native(path, members, info.inputs)
    model = PackagedModel(native, parse_manifest(path, {**values, "members": {}}))
    _check_results(reference, model, inputs.args, inputs.kwargs)
    write_model_file(path, values, members)
    return read_manifest(path)


def _check_path(path: str | os.PathLike[str]) -> None:
    """Find out before the long work that its result could not be written."""
    folder = Path(os.path.realpath(path)).parent
    if Path(path).is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK):
        reason = f"the folder {folder} is read-only"
    else:
        return
    raise ModelFileError(f"{path} cannot be written: {reason}", path=str(path))


def _check_compiler() -> None:
    if find_compiler(os.environ, shutil.which) is None:
        raise PackagingError(
            f"there is no C++ compiler (CXX={os.environ.get('CXX', '')!r}): install one (Debian, Ubuntu: "
            f"apt-get install g++; Fedora: dnf install gcc-c++), or point CXX to one. The package "
            f"itself runs without"
        )


def _check_limit(backend: BasePT2EBackend) -> None:
    """Refuse to compile for this very CPU where its kernels may not use all that it has."""
    forbidden = {*read_host().instruction_sets} - {*backend.cpu_features}
    if forbidden:
        raise PackagingError(
            f"a package uses all instructions of the CPU that it is made on, but the environment "
            f"forbids {', '.join(sorted(forbidden))} to the kernels "
            f"(ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA', '')!r}): unset it, or package on "
            f"a CPU of the kind that it is for"
        )


def _check_int8(audited: Audit) -> None:
    if audited.int8_count == 0:
        reasons = dict.fromkeys(str(layer.reason) for layer in audited.float_layers)
        raise PackagingError(
            f"no layer of this reference runs as int8 on {audited.backend!r}, so a package would be "
            f"slower than float: {'; '.join(reasons) or 'it has no layers'}"
        )


def _compiled(
    reference: GraphModule, info: ReferenceInfo, backend: BasePT2EBackend
) -> dict[str, bytes]:
    try:
        with torch.no_grad(), backend.environment_context():
            program = reexport(reference, info)
            args, kwargs = program.example_inputs
            module = program.module(check_guards=False)
            assert isinstance(module, GraphModule)
            _refuse_state(module)
            _leave_inputs_alone(module)
            members = _torch_compat.compile_ahead_of_time(module, args, kwargs)
    except VersatilError:
        raise
    # AOTInductor fails with errors of many unrelated types, the C++ compiler's among them.
    except Exception as error:
        raise PackagingError(
            f"AOTInductor cannot compile this reference: {type(error).__name__}: "
            f"{str(error)[:_MAX_REASON]}\nWhat to do: if versatil_core.compile() can, take out of the "
            f"model what is named here; AOTInductor takes fewer operators"
        ) from error
    return {name: _without_commands(name, data) for name, data in members.items()}


def _refuse_state(module: GraphModule) -> None:
    """Refuse a model that remembers something from call to call: in a package it would be lost."""
    written = [node for node in module.graph.find_nodes(op="get_attr") if is_written(node)]
    if written:
        raise PackagingError(
            f"the model writes to its own {', '.join(str(node.target) for node in written)}, and a "
            f"package keeps nothing from one call to the next: make it an input and an output, or "
            f"use versatil_core.compile()"
        )


def _leave_inputs_alone(module: GraphModule) -> None:
    """Let a model that writes to its inputs write to copies."""
    for node in module.graph.find_nodes(op="placeholder"):
        if is_written(node):
            with module.graph.inserting_after(node):
                copied = module.graph.call_function(torch.ops.aten.clone.default, (node,))
            copied.meta = dict(node.meta)
            node.replace_all_uses_with(
                copied, delete_user_cb=lambda user, own=copied: user is not own
            )
    module.recompile()


def _without_commands(name: str, data: bytes) -> bytes:
    """Cut off the commands at the end of generated code: they name folders of this machine."""
    return data.partition(b"\n// Compile cmd")[0] if name.endswith(".cpp") else data


def _check_calls(members: Mapping[str, bytes], audited: Audit) -> int:
    code = "\n".join(data.decode() for name, data in members.items() if name.endswith(".cpp"))
    found = int8_calls(code)
    if found < audited.kernel_call_count:
        raise PackagingError(
            f"the compiled code calls {found} int8 kernels, and the audit says {audited.kernel_call_count}: "
            f"layers would silently run as float. Nothing was written; please report this"
        )
    return found


def _package_info(backend: BasePT2EBackend, audited: Audit, calls: int) -> PackageInfo:
    host = read_host()
    return PackageInfo(
        backend=TargetInfo(
            "", backend.name, backend_options(backend), dict(backend.option_reasons)
        ),
        machine=host.machine,
        cpu=host.cpu,
        # torch tells the compiler to use this very CPU.
        cpu_features=host.instruction_sets,
        settings=backend.inductor_settings.as_texts(),
        audit=audited.to_dict(),
        int8_kernel_calls=calls,
    )


def _check_results(
    reference: GraphModule, model: PackagedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Run the package once, and compare what comes out with the reference's results."""
    leaves = [
        leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in _torch_compat.flatten_inputs(args, kwargs)
    ]
    own_args, own_kwargs = _torch_compat.unflatten_like(leaves, args, kwargs)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        expected = reference(*own_args, **own_kwargs)
    results = model(*args, **kwargs)
    if not _torch_compat.same_structure((results,), {}, ((expected,), {})):
        raise PackagingError("the package gives results that nest otherwise than the reference's")
    pairs = zip(
        _torch_compat.tree_leaves(results), _torch_compat.tree_leaves(expected), strict=True
    )
    for index, (result, wanted) in enumerate(pairs):
        _check_result(index, result, wanted)


def _check_result(index: int, result: Any, wanted: Any) -> None:
    if _kind(result) != _kind(wanted):
        raise PackagingError(
            f"result {index} of the package is {_kind(result)}, but that of the reference is "
            f"{_kind(wanted)}; nothing was written. Packages give tensors only; if both are tensors, "
            f"please report this"
        )
    if not isinstance(wanted, torch.Tensor) or not wanted.is_floating_point():
        return
    if not torch.equal(torch.isfinite(result), torch.isfinite(wanted)):
        raise PackagingError(
            f"result {index} of the package and that of the reference have infinities or NaNs in "
            f"different places; nothing was written. Please report this"
        )
    if (distance := sqnr_db(result, wanted)) < _DOUBTFUL_DB:
        _log.warning(
            "result %d of the package is only %.1f dB from the reference's on the example inputs: "
            "compare versatil_core.lower() with the reference by check_exactness()",
            index,
            distance,
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return repr(value)
