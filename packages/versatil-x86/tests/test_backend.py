"""The x86 backend: options, discovery, and what it does on this and on other machines."""

import inspect
import sys
from typing import Any

import pytest
import torch
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer, Quantizer

from versatil_core import (
    UnsupportedHostError,
    audit,
    backend_options,
    create_backend,
    load_backend,
    lower,
    quantize,
)
from versatil_core.host import Host
from versatil_x86 import CPUFeatures, X86InductorBackend


def test_constructor() -> None:
    parameters = inspect.signature(X86InductorBackend).parameters

    assert {name: p.default for name, p in parameters.items()} == {
        "is_dynamic": False,
        "is_qat": False,
        "reduce_range": False,
        "saturation": None,
        "float_dtype": "float32",
    }
    assert X86InductorBackend.name == "x86_inductor"
    assert X86InductorBackend().supported_device_types == ("cpu",)


def test_it_is_found_by_name() -> None:
    backend = create_backend("x86_inductor", {"is_dynamic": True, "reduce_range": True})

    assert load_backend("x86_inductor") is X86InductorBackend
    assert backend_options(backend) == {
        "is_dynamic": True,
        "is_qat": False,
        "reduce_range": True,
        "saturation": "reduce_range",
        "float_dtype": "float32",
    }


@pytest.mark.parametrize(
    ("features", "saturation"),
    [
        (CPUFeatures(avx2=True), "safe"),
        (CPUFeatures(avx2=True, avx512=True), "safe"),
        (CPUFeatures(avx2=True, avx512=True, avx512_vnni=True), "ignore"),
        (CPUFeatures(avx2=True, avx_vnni=True), "ignore"),
    ],
)
def test_for_host_follows_the_cpu(features: CPUFeatures, saturation: str) -> None:
    backend = X86InductorBackend.for_host(features=features, is_dynamic=True)

    assert backend.saturation == saturation
    assert not backend.reduce_range
    assert backend.is_dynamic


def test_for_host_never_saturates_here() -> None:
    backend = X86InductorBackend.for_host()
    layer, x = torch.nn.Linear(8, 4), torch.rand(3, 8)
    torch.nn.init.ones_(layer.weight)

    reference = quantize(layer, x, backend, [x])

    assert audit(reference, backend).saturating_layers == ()
    can_saturate = backend.lowering_rules.saturating_pairs is not None
    assert can_saturate is (backend.saturation == "safe")


def test_a_safe_quantizer_has_its_own_observers() -> None:
    model, x = torch.nn.Linear(4, 4).eval(), torch.randn(3, 4)
    quantizer = X86InductorBackend(saturation="safe").create_quantizer()

    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)

    observers = {type(module).__name__ for module in prepared.modules()}
    assert {"HistogramObserver", "PairSafePerChannelObserver"} <= observers


def test_quantizers_compose() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    quantizers = [
        X86InductorBackend().create_quantizer("0"),
        X86InductorBackend(is_dynamic=True).create_quantizer("1"),
    ]
    assert all(isinstance(quantizer, Quantizer) for quantizer in quantizers)

    prepared = prepare_pt2e(
        torch.export.export(model, (x,)).module(), ComposableQuantizer(quantizers)
    )

    observers = [type(module).__name__ for module in prepared.modules()]
    assert observers.count("HistogramObserver") == 1
    assert observers.count("PlaceholderObserver") == 1
    assert observers.count("PerChannelMinMaxObserver") == 2


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_on_another_machine_only_running_fails(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    x = torch.randn(3, 4)
    backend = X86InductorBackend(reduce_range=True)

    reference = quantize(torch.nn.Linear(4, 2), x, backend, [x])

    assert reference(x).shape == (3, 2)
    with pytest.raises(UnsupportedHostError, match=f"{machine}") as error:
        lower(reference, backend)
    assert error.value.machine_types == ("x86_64", "amd64")


def test_training_quantizer() -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

    # With a batch norm torchao takes half a minute: see test_pair_safe_training.py.
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    exported = torch.export.export(model.train(), (x,)).module()

    prepared = prepare_qat_pt2e(exported, X86InductorBackend(is_qat=True).create_quantizer())

    kinds = {type(module).__name__ for module in prepared.modules()}
    assert {"FusedMovingAvgObsFakeQuantize"} <= kinds
    loss: Any = prepared(x).sum()
    loss.backward()
    converted = convert_pt2e(prepared)
    targets = [str(node.target) for node in converted.graph.nodes]
    assert any("dequantize_per_channel" in target for target in targets)


def test_cpu_features_are_those_that_kernels_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host("", "x86_64", 1, (), ("avx", "avx2", "avx512f", "fma"))
    monkeypatch.setattr(sys.modules["versatil_x86.backend"], "read_host", lambda: host)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert X86InductorBackend().cpu_features == ("avx", "avx2", "avx512f", "fma")

    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert X86InductorBackend().cpu_features == ("avx", "avx2", "fma")
