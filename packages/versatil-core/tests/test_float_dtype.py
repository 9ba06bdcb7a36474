"""The dtype of float parts, decided once; and autocast, followed or refused."""

from typing import Any

import pytest
import torch
from torch import nn

from versatil_core import (
    AutocastError,
    BackendOptionError,
    QuantizationTarget,
    TargetError,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    convert,
    export,
    lower,
    prepare,
    quantize,
    with_float_dtype,
)
from versatil_core.calibration import calibrate
from versatil_core.float_dtype import check_float_dtype, common_float_dtype, has_bfloat16

BFLOAT16 = torch.bfloat16


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    return model.eval(), torch.randn(4, 16)


def in_bfloat16(backend: Any) -> Any:
    backend.float_dtype = "bfloat16"
    return backend


def test_names_of_dtypes() -> None:
    assert check_float_dtype("any", torch.bfloat16) == "bfloat16"
    assert check_float_dtype("any", "float32") == "float32"
    with pytest.raises(BackendOptionError, match="choose float32 or bfloat16"):
        check_float_dtype("any", "bf16")


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_kernels_that_write_float32_only(linear_backend: Any, is_dynamic: bool) -> None:
    """The cast behind them is an op of its own."""
    model, x = small()
    backend = in_bfloat16(linear_backend(is_dynamic=is_dynamic))
    reference = quantize(model, x, backend, [x])
    assert reference(x).dtype is BFLOAT16
    check_exactness(reference, lower(reference, backend), x).raise_if_inexact()


def test_step_by_step(linear_backend: Any) -> None:
    model, x = small()
    backend = in_bfloat16(linear_backend())
    prepared = prepare(export(model, x), backend)
    calibrate(prepared, [x], x)
    assert torch.equal(convert(prepared)(x), quantize(model, x, backend, [x])(x))


def test_a_reference_from_before(linear_backend: Any) -> None:
    model, x = small()
    reference = quantize(model, x, linear_backend(), [x])
    assert not has_bfloat16(reference)
    assert with_float_dtype(reference, "float32") is reference
    converted = with_float_dtype(reference, "bfloat16")
    assert has_bfloat16(converted)
    assert reference(x).dtype is torch.float32
    assert lower(reference, in_bfloat16(linear_backend()))(x).dtype is BFLOAT16


def test_targets_agree(linear_backend: Any) -> None:
    plain, asking = linear_backend(), in_bfloat16(linear_backend())
    targets = [QuantizationTarget("0", plain), QuantizationTarget("2", asking)]
    with pytest.raises(TargetError, match="'2' for bfloat16, '0' for float32"):
        common_float_dtype(targets)
    assert common_float_dtype(targets[1:]) == "bfloat16"


def test_autocast(linear_backend: Any) -> None:
    model, x = small()
    backend = linear_backend()
    reference = quantize(model, x, backend, [x])
    compiled = compile(reference, backend)
    with torch.autocast("cpu", BFLOAT16):
        by_autocast = lower(reference, backend)
        with pytest.raises(AutocastError, match="a model is captured"):
            export(model, x)
        with pytest.raises(AutocastError, match="a compiled model is called"):
            compiled(x)
    assert torch.equal(by_autocast(x), with_float_dtype(reference, BFLOAT16)(x))
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(AutocastError, match=r"torch\.float16"),
    ):
        lower(reference, backend)
