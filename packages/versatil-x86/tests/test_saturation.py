"""The option ``saturation``: what each value comes to on which CPU, why, and where one reads it."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from versatil_core import (
    BackendOptionError,
    audit,
    backend_options,
    create_backend,
    host_backend,
    load,
    load_quantizer_module,
    quantize,
    read_manifest,
    save,
)
from versatil_x86 import CPUFeatures, X86InductorBackend
from versatil_x86.saturation import choose_saturation

WITH_VNNI = {
    "avx_vnni": CPUFeatures(avx2=True, avx_vnni=True),
    "avx512_vnni": CPUFeatures(avx2=True, avx512=True, avx512_vnni=True),
    "amx": CPUFeatures(avx2=True, avx512=True, avx512_vnni=True, amx_int8=True),
}
WITHOUT_VNNI = {
    "avx2": CPUFeatures(avx2=True),
    "avx512": CPUFeatures(avx2=True, avx512=True),
    "none": CPUFeatures(),
}
CPUS = WITH_VNNI | WITHOUT_VNNI


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("reduce_range", [False, True])
@pytest.mark.parametrize("wanted", [None, "auto", "safe", "reduce_range", "ignore"])
def test_every_combination(wanted: str | None, cpu: str, *, reduce_range: bool) -> None:
    features = CPUS[cpu]
    if reduce_range and wanted not in (None, "reduce_range"):
        with pytest.raises(BackendOptionError, match="contradicts reduce_range=True") as error:
            choose_saturation(wanted, reduce_range=True, features=features)
        assert (error.value.option, error.value.value) == ("saturation", wanted)
        return

    choice = choose_saturation(wanted, reduce_range=reduce_range, features=features)

    if wanted == "auto":
        assert choice.saturation == ("ignore" if features.has_vnni else "safe")
        assert str(features) in choice.reason
        assert ("has VNNI" in choice.reason) is features.has_vnni
        assert ("no VNNI" in choice.reason) is not features.has_vnni
    elif wanted is None and not reduce_range:
        assert choice.saturation == "ignore"
        assert "default" in choice.reason
    else:
        assert choice.saturation == (wanted or "reduce_range")
        assert choice.reason == "chosen by the caller"


@pytest.mark.parametrize("value", ["Safe", "", "none", True, 7, ["safe"]])
@pytest.mark.parametrize("reduce_range", [False, True])
def test_another_value_is_refused(value: Any, *, reduce_range: bool) -> None:
    with pytest.raises(BackendOptionError, match="safe, reduce_range, ignore, auto") as error:
        X86InductorBackend(reduce_range=reduce_range, saturation=value)

    assert error.value.backend == "x86_inductor"
    assert error.value.value == value


@pytest.mark.parametrize("cpu", CPUS)
def test_the_constructor_asks_this_cpu_only_for_auto(
    cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPUFeatures, "detect", lambda: CPUS[cpu])
    wanted = "ignore" if cpu in WITH_VNNI else "safe"

    assert X86InductorBackend(saturation="auto").saturation == wanted
    assert X86InductorBackend.for_host().saturation == wanted
    assert X86InductorBackend().saturation == "ignore"
    for_others = X86InductorBackend.for_host(features=CPUFeatures(avx2=True))
    assert for_others.saturation == "safe"


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("saturation", ["auto", "safe", "reduce_range", "ignore"])
def test_for_host(saturation: str, cpu: str) -> None:
    features = CPUS[cpu]

    backend = X86InductorBackend.for_host(
        is_dynamic=True, is_qat=True, saturation=saturation, features=features
    )

    choice = choose_saturation(saturation, features=features)
    assert backend.saturation == choice.saturation
    assert backend.option_reasons == {"saturation": choice.reason}
    assert backend.reduce_range is (choice.saturation == "reduce_range")
    assert backend.is_dynamic
    assert backend.is_qat


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduce_range": True},
        {"saturation": "reduce_range"},
        {"saturation": "safe", "is_dynamic": True},
        {"saturation": "ignore", "is_qat": True},
        {"saturation": "auto"},
    ],
)
def test_options_make_an_equal_backend(options: dict[str, Any]) -> None:
    backend = create_backend("x86_inductor", options)

    found = json.loads(json.dumps(backend_options(backend)))  # as in a manifest
    again = create_backend("x86_inductor", found)

    assert backend_options(again) == found
    assert repr(again) == repr(backend)
    names = ["is_dynamic", "is_qat", "reduce_range", "saturation", "float_dtype"]
    assert list(found) == names
    assert found["saturation"] in ("safe", "reduce_range", "ignore")  # resolved, so no "auto"
    assert repr(backend).endswith(f"saturation={found['saturation']!r}, float_dtype='float32')")


@pytest.mark.parametrize("options", [{"saturation": "reduce_range"}, {"reduce_range": True}])
def test_an_option_of_the_host_s_backend(options: dict[str, Any]) -> None:
    backend = host_backend("x86_inductor", options)

    assert backend_options(backend)["reduce_range"] is True
    assert backend_options(backend)["saturation"] == "reduce_range"


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)).eval()


def images() -> Tensor:
    return torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cpu", ["avx_vnni", "avx2"])
def test_a_saved_model_says_what_was_chosen_and_why(cpu: str, tmp_path: Path) -> None:
    backend = X86InductorBackend.for_host(features=CPUS[cpu])
    reference = quantize(small(), images(), backend, [images()])

    save(reference, tmp_path / "model.pt2")

    [target] = read_manifest(tmp_path / "model.pt2").info.targets
    assert target.options["saturation"] == ("ignore" if cpu == "avx_vnni" else "safe")
    assert target.reasons == backend.option_reasons
    assert str(CPUS[cpu]) in target.reasons["saturation"]
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        texts = [archive.read(name) for name in archive.namelist() if name.endswith(".json")]
    assert any(target.reasons["saturation"].encode() in text for text in texts)
    reason = target.reasons["saturation"]
    assert any(reason in note for note in audit(load(tmp_path / "model.pt2"), backend).notes)


def of_torchao(model: nn.Module, x: Tensor, **options: Any) -> GraphModule:
    torchao = load_quantizer_module("x86_inductor_quantizer")
    quantizer = torchao.X86InductorQuantizer()
    quantizer.set_global(torchao.get_default_x86_inductor_quantization_config(**options))
    with torch.no_grad():
        # Strict: after the other kind of export, torchao 0.15 annotates nothing.
        exported = torch.export.export(model, (x,), strict=True)
        prepared = prepare_pt2e(exported.module(), quantizer)
        prepared(x)
        reference: GraphModule = convert_pt2e(prepared)
    return reference


def constants(reference: GraphModule) -> list[Any]:
    """The values that the graph reads; they have other names."""
    state = {**reference.state_dict(), **dict(reference.named_buffers())}
    names = {str(node.target) for node in reference.graph.nodes if node.op == "get_attr"}
    return sorted(state[name].flatten().tolist() for name in names)


def ranges(reference: GraphModule) -> set[tuple[Any, ...]]:
    quantize_op = torch.ops.quantized_decomposed.quantize_per_tensor.default
    return {node.args[3:5] for node in reference.graph.nodes if node.target is quantize_op}


@pytest.mark.parametrize("cpu", WITH_VNNI)
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_with_vnni_nothing_changes(cpu: str, *, is_dynamic: bool) -> None:
    """The int8 weights, scales and results of torchao's own full-range recipe, bit by bit."""
    model: nn.Module = small()[-1:] if is_dynamic else small()  # type: ignore[index]
    x = torch.rand(4, 128) if is_dynamic else images()
    backend = X86InductorBackend.for_host(features=CPUS[cpu], is_dynamic=is_dynamic)

    reference = quantize(model, x, backend, None if is_dynamic else [x])

    wanted = of_torchao(model, x, is_dynamic=is_dynamic)
    assert torch.equal(reference(x), wanted(x))
    assert constants(reference) == constants(wanted)
    if not is_dynamic:
        assert ranges(reference) == ranges(wanted) == {(0, 255)}


def test_without_vnni_activations_keep_8_bits_and_weights_change() -> None:
    model, x = small(), images()

    safe = quantize(model, x, X86InductorBackend(saturation="safe"), [x])
    full = quantize(model, x, X86InductorBackend(), [x])
    reduced = quantize(model, x, X86InductorBackend(saturation="reduce_range"), [x])
    also_reduced = quantize(model, x, X86InductorBackend(reduce_range=True), [x])

    assert ranges(safe) == ranges(full) == {(0, 255)}
    assert ranges(reduced) == {(0, 127)}
    assert torch.equal(reduced(x), also_reduced(x))
    assert not torch.equal(safe(x), full(x))
