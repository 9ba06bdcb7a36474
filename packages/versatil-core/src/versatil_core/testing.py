"""For tests: the suite that a hardware package subclasses, and two assertions for models.

A hardware package proves that it keeps the contract with a test module of a few lines::

    from versatil_core.testing import BackendConformance
    from versatil_yours import YourBackend


    class TestConformance(BackendConformance):
        backend_class = YourBackend

pytest finds and runs the suite (``pip install pytest``); importing this module needs no pytest.
"""

from typing import Any

import torch
from torch.fx import GraphModule

from versatil_core.audit import Audit, LayerAudit, audit, audited_layers
from versatil_core.backend import BasePT2EBackend
from versatil_core.compile import CompiledModel
from versatil_core.conformance_contract import ContractConformance
from versatil_core.conformance_environment import EnvironmentConformance
from versatil_core.conformance_kernels import KernelConformance
from versatil_core.conformance_layers import LayerConformance
from versatil_core.exactness import check_exactness
from versatil_core.layer_report import LayerReport
from versatil_core.lower import is_lowered, lower, lowering_record
from versatil_core.packaged_model import PackagedModel
from versatil_core.report_result import Report

__all__ = [
    "BackendConformance",
    "KernelConformance",
    "PortableConformance",
    "assert_exact",
    "assert_int8",
]


class PortableConformance(ContractConformance, EnvironmentConformance, LayerConformance):
    """The part of :class:`BackendConformance` that is the same on every machine: no kernel runs."""


class BackendConformance(PortableConformance, KernelConformance):
    """Proves that a backend keeps the contract of :class:`versatil_core.BasePT2EBackend`.

    Derive a class from it whose name begins with ``Test``, and set :attr:`backend_class`. On a
    machine without the backend's kernels, the tests that run one are skipped, and say so; set
    :attr:`must_run_kernels` where that would be a failure. To mark the two halves differently,
    derive from :class:`PortableConformance` and :class:`KernelConformance` instead.
    """


def assert_int8(model: Audit | Report | torch.nn.Module, *, min_layers: int | None = None) -> None:
    """Fail unless a model runs as int8.

    Args:
        model: What :func:`versatil_core.compile`, :func:`versatil_core.lower` or
            :func:`versatil_core.load_package` returned; or an audit or a report of one.
        min_layers: How many layers have to be int8; all of them if None.

    Raises:
        AssertionError: Too few are; names those that stay float, with their reasons.
        TypeError: ``model`` is none of these.

    Example:
        >>> import torch
        >>> from versatil_core import compile, host_backend, quantize
        >>> model, x, backend = torch.nn.Linear(8, 4), torch.randn(2, 8), host_backend()
        >>> assert_int8(compile(quantize(model, x, backend, [x]), backend))
    """
    layers = _layers_of(model)
    count = sum(layer.is_int8 for layer in layers)
    wanted = max(len(layers), 1) if min_layers is None else min_layers
    lines = [
        f"  {layer.module_path or layer.node}: {layer.reason}"
        for layer in layers
        if not layer.is_int8
    ]
    assert count >= wanted, "\n".join(
        [f"{count} of {len(layers)} layers are int8, expected {wanted}", *lines]
    )


def _layers_of(
    model: Audit | Report | torch.nn.Module,
) -> tuple[LayerAudit, ...] | tuple[LayerReport, ...]:
    if isinstance(model, Audit | Report):
        return model.layers
    if isinstance(model, CompiledModel):
        return audit(model.reference, model.backend).layers
    if isinstance(model, PackagedModel) and model.manifest.package is not None:
        return Audit.from_dict(model.manifest.package.audit).layers
    if is_lowered(model):
        return audited_layers(lowering_record(model))
    raise TypeError(
        f"{type(model).__name__} is no model that versatil made run as int8: pass what compile(), lower() or "
        f"load_package() returned, or an audit or a report"
    )


def assert_exact(reference: GraphModule, backend: BasePT2EBackend, *inputs: Any) -> None:
    """Fail unless each int8 operation gives what the reference defines.

    Args:
        reference: From :func:`versatil_core.quantize` or :func:`versatil_core.load`.
        backend: The hardware in question; this machine must have its kernels.
        inputs: Positional inputs of the model.

    Raises:
        InexactError: An ``AssertionError`` that names the operations that are not exact.
        UnsupportedHostError: This machine does not have the backend's kernels.

    Example:
        >>> import torch
        >>> from versatil_core import host_backend, quantize
        >>> model, x, backend = torch.nn.Linear(8, 4), torch.randn(2, 8), host_backend()
        >>> assert_exact(quantize(model, x, backend, [x]), backend, x)
    """
    check_exactness(reference, lower(reference, backend), inputs).raise_if_inexact()
