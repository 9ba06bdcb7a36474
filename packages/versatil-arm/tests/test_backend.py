"""The Arm backend: options, discovery, and what it does on this and on other machines."""

import inspect
import itertools
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

import versatil_core
from versatil_arm import ArmInductorBackend, CPUFeatures
from versatil_core import (
    BackendOptionError,
    TrainingUnsupportedError,
    UnsupportedHostError,
    VersatilError,
    audit,
    backend_options,
    create_backend,
    load,
    load_backend,
    lower,
    quantize,
    reference_info,
    save,
    sqnr_db,
)

needs_entry_point = pytest.mark.skipif(
    "arm_inductor" not in entry_points(group="versatil.backends").names,
    reason="runs on the sources: entry points belong to an installed distribution",
)
OPTIONS = [*itertools.product((False, True), (False, True), (False, True), ("int8", "uint8"))]


def test_constructor() -> None:
    parameters = inspect.signature(ArmInductorBackend).parameters

    assert {name: p.default for name, p in parameters.items()} == {
        "is_dynamic": False,
        "is_qat": False,
        "is_per_channel": True,
        "activation_dtype": "int8",
        "columns_bytes_max": 64 * 2**20,
        "float_dtype": "float32",
    }
    assert ArmInductorBackend.name == "arm_inductor"
    assert ArmInductorBackend().supported_device_types == ("cpu",)


@pytest.mark.parametrize("options", OPTIONS)
def test_options_and_back(options: tuple[bool, bool, bool, str]) -> None:
    backend = ArmInductorBackend(*options)

    names = ("is_dynamic", "is_qat", "is_per_channel", "activation_dtype")
    others = {"columns_bytes_max": 64 * 2**20, "float_dtype": "float32"}
    assert backend_options(backend) == dict(zip(names, options, strict=True)) | others
    again = json.loads(json.dumps(backend_options(backend)))
    assert backend_options(ArmInductorBackend(**again)) == again
    assert eval(repr(backend)).activation_dtype == options[3]  # noqa: S307 -- our own text
    assert repr(eval(repr(backend))) == repr(backend)  # noqa: S307 -- likewise


def test_repr() -> None:
    assert repr(ArmInductorBackend(True, activation_dtype="uint8")) == (
        "ArmInductorBackend(is_dynamic=True, is_qat=False, is_per_channel=True, "
        "activation_dtype='uint8', columns_bytes_max=67108864, float_dtype='float32')"
    )


@needs_entry_point
def test_it_is_found_by_name() -> None:
    options = {"is_dynamic": True, "is_per_channel": False, "activation_dtype": "uint8"}

    backend = create_backend("arm_inductor", options)

    assert load_backend("arm_inductor") is ArmInductorBackend
    assert backend_options(backend).items() >= {**options, "is_qat": False}.items()


@needs_entry_point
@pytest.mark.parametrize("options", [{"reduce_range": True}, {"activation_dtype": "int4"}])
def test_options_it_does_not_have(options: dict[str, object]) -> None:
    with pytest.raises(VersatilError, match=next(iter(options))):
        create_backend("arm_inductor", options)


def test_a_bad_value_is_refused_at_once() -> None:
    with pytest.raises(BackendOptionError, match="choose one of int8, uint8") as error:
        ArmInductorBackend(activation_dtype="float16")

    assert (error.value.backend, error.value.value) == ("arm_inductor", "float16")


@pytest.mark.parametrize("value", [-1, 1.5, "64 MB", True, None])
def test_a_limit_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises(BackendOptionError, match=r"columns_bytes_max=.*number of bytes"):
        ArmInductorBackend(columns_bytes_max=value)


def test_the_limit_of_columns_is_an_option() -> None:
    model, x = torch.nn.Conv2d(3, 4, 3, padding=1), torch.randn(1, 3, 8, 8)
    backend = ArmInductorBackend.for_host(columns_bytes_max=8 * 8 * 3 * 3 * 3 - 1)
    reference = quantize(model, x, backend, calibration=[x])

    [layer] = audit(reference, backend).layers
    assert not layer.is_int8
    [layer] = audit(reference, ArmInductorBackend(columns_bytes_max=8 * 8 * 3 * 3 * 3)).layers
    assert layer.columns_bytes == backend.columns_bytes_max + 1


@pytest.mark.parametrize(
    "features", [None, CPUFeatures(), CPUFeatures(dotprod=True, i8mm=True, bf16=True, sve=True)]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_for_host_keeps_what_was_asked_for(
    options: tuple[bool, bool, bool, str], features: CPUFeatures | None
) -> None:
    """No Arm CPU needs other options than another."""
    is_dynamic, is_qat, is_per_channel, dtype = options

    backend = ArmInductorBackend.for_host(
        is_dynamic=is_dynamic,
        is_qat=is_qat,
        is_per_channel=is_per_channel,
        activation_dtype=dtype,
        features=features,
    )

    assert repr(backend) == repr(ArmInductorBackend(*options))


def test_for_host_checks_values() -> None:
    with pytest.raises(BackendOptionError, match="activation_dtype"):
        ArmInductorBackend.for_host(activation_dtype="s8")


@pytest.mark.portable
@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "riscv64"])
def test_on_another_machine_only_running_fails(
    machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    x = torch.randn(3, 4)
    backend = ArmInductorBackend()

    reference = quantize(torch.nn.Linear(4, 2), x, backend, [x])
    save(reference, tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")

    assert torch.equal(loaded(x), reference(x))
    assert audit(loaded, backend).int8_count == 1
    for run in (lower, versatil_core.compile):
        with pytest.raises(UnsupportedHostError, match="Quantizing for it works here") as error:
            run(loaded, backend)
        assert "arm_inductor" in str(error.value)
        assert "aarch64" in str(error.value)
        assert error.value.machine == machine.lower()
        assert error.value.machine_types == ("aarch64",)


@pytest.mark.portable
@pytest.mark.parametrize(("is_per_channel", "dtype", "is_dynamic"), [
    (True, "int8", False), (False, "uint8", False), (True, "uint8", True), (False, "int8", True),
])  # fmt: skip
def test_saved_and_loaded(
    model: torch.nn.Module,
    batch: torch.Tensor,
    tmp_path: Path,
    dtype: str,
    *,
    is_per_channel: bool,
    is_dynamic: bool,
) -> None:
    """The file says how it was quantized, and gives the same numbers and the same kernels."""
    backend = ArmInductorBackend(is_dynamic, False, is_per_channel, dtype)
    reference = quantize(model, batch, backend, None if is_dynamic else [batch])

    save(reference, tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")

    assert torch.equal(loaded(batch), reference(batch))
    [target] = reference_info(loaded).targets
    assert target.backend == "arm_inductor"
    assert target.options == backend_options(backend)
    kernels = [(layer.module_path, layer.kernel) for layer in audit(loaded, backend).layers]
    assert kernels == [
        (layer.module_path, layer.kernel) for layer in audit(reference, backend).layers
    ]
    assert audit(loaded, backend).int8_count == 6


def test_training_is_not_for_quantize() -> None:
    with pytest.raises(TrainingUnsupportedError, match="ArmInductorBackend"):
        quantize(torch.nn.Linear(4, 2), torch.randn(3, 4), ArmInductorBackend(is_qat=True))


@pytest.mark.portable
def test_per_channel_is_more_accurate_where_channels_differ() -> None:
    """What the option is for."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(16, 8), torch.randn(64, 16)
    with torch.no_grad():
        layer.weight *= torch.logspace(-3, 0, 8)[:, None]
    small = {}
    for is_per_channel in (True, False):
        reference = quantize(layer, x, ArmInductorBackend(is_per_channel=is_per_channel), [x])
        small[is_per_channel] = sqnr_db(reference(x)[:, 0], layer(x)[:, 0])

    assert small[True] > small[False] + 10


CODE = """
import json, os, sys
import torch
import torch._inductor.config as config
modules = set(sys.modules)
before = config.get_config_copy(), dict(os.environ)
import versatil_arm, versatil_arm.backend, versatil_arm.quantization_config, versatil_arm.dynamo
versatil_arm.ArmInductorBackend.for_host().lowering_rules
assert (config.get_config_copy(), dict(os.environ)) == before
print(json.dumps(sorted(set(sys.modules) - modules)))
"""


@pytest.mark.portable
def test_importing_is_cheap_and_changes_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr
    loaded = json.loads(result.stdout.splitlines()[-1])
    assert "versatil_arm" in loaded
    expensive = ("torchao", "torch._inductor.compile_fx", "transformers", "versatil_x86", "typer")
    assert not [name for name in loaded if name.startswith(expensive)]
