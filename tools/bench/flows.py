"""The flows that the benchmark compares, each as its users would write it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.bench_models import BenchModel
from versatil_core import compile as compile_int8
from versatil_core import host_backend, quantize
from versatil_core.export import ModelInputs
from versatil_core.speed import compile_float

Model = Callable[..., torch.Tensor]


class NotAvailableError(Exception):
    """A flow can't run a model here; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """A compiled model, and what it took to get there.

    Attributes:
        compiled: Call it under ``torch.no_grad()``.
        reference: The quantized graph that defines its result; the float model for float.
        quantize_seconds: Export, calibration and conversion.
        compile_seconds: Until the first call has returned.
    """

    compiled: Model
    reference: Model
    quantize_seconds: float
    compile_seconds: float


def float_frozen(bench: BenchModel) -> Prepared:
    """``torch.compile`` with freezing, no quantization."""
    start = time.perf_counter()
    compiled = compile_float(bench.model, host_backend(), ModelInputs(bench.example, {}))
    return Prepared(compiled, bench.model, 0.0, time.perf_counter() - start)


def versatil(bench: BenchModel) -> Prepared:
    """Ours."""
    backend = host_backend()
    start = time.perf_counter()
    reference = quantize(bench.model, bench.example, backend, bench.calibration)
    quantized = time.perf_counter()
    compiled = compile_int8(reference, backend)
    compiled(*bench.example)
    return Prepared(compiled, reference, quantized - start, time.perf_counter() - quantized)


def torchao(bench: BenchModel) -> Prepared:
    """Plain torchao: its quantizer, and its patterns through a frozen ``torch.compile``.

    Importing torchao's quantizer registers the patterns for the whole process, and freezing is
    set for the whole process, as torchao's tutorial does it.

    Raises:
        NotAvailableError: torch or torchao fails on this model.
    """
    try:
        return _torchao(bench)
    except RuntimeError as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NotAvailableError(f"torchao fails on this model: {reason[0]}") from error


def _torchao(bench: BenchModel) -> Prepared:
    import torch._inductor.config as inductor_config
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    inductor_config.freezing = True
    is_arm = host_backend().name == "arm_inductor"
    quantizer = _arm_quantizer() if is_arm else _x86_quantizer()
    start = time.perf_counter()
    # On Arm it annotates nothing after non-strict export.
    exported = torch.export.export(bench.model, bench.example, strict=is_arm).module()
    prepared = prepare_pt2e(exported, quantizer)
    for batch in bench.calibration:
        prepared(*batch)
    reference = convert_pt2e(prepared)
    quantized = time.perf_counter()
    compiled = torch.compile(reference)
    compiled(*bench.example)
    return Prepared(compiled, reference, quantized - start, time.perf_counter() - quantized)


def _x86_quantizer() -> Any:
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86

    # What keeps its kernels exact on a CPU without VNNI. With VNNI both flows quantize alike;
    # without, ours keeps the 8th bit of activations, and the references differ.
    reduce_range = getattr(host_backend(), "saturation", "ignore") != "ignore"
    config = x86.get_default_x86_inductor_quantization_config(reduce_range=reduce_range)
    return x86.X86InductorQuantizer().set_global(config)


def _arm_quantizer() -> Any:
    import torchao.quantization.pt2e.quantizer.arm_inductor_quantizer as arm

    config = arm.get_default_arm_inductor_quantization_config()
    return arm.ArmInductorQuantizer().set_global(config)


FLOWS: dict[str, Callable[[BenchModel], Prepared]] = {
    "float": float_frozen,
    "torchao": torchao,
    "versatil": versatil,
}


def default_flows() -> list[str]:
    """All flows that make int8 kernels here.

    On Arm torchao's default configuration makes none, and convolutions may fail: ask for it by
    name to see.
    """
    is_arm = host_backend().name == "arm_inductor"
    return [flow for flow in FLOWS if flow != "torchao" or not is_arm]
