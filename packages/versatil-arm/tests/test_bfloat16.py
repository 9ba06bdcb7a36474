"""Float parts in bfloat16: the products of int8 matrices stay, and Inductor rounds in the loop behind them."""

from typing import Any

import pytest
import torch

from versatil_arm import ArmInductorBackend
from versatil_core import audit, check_exactness, compile, lower, quantize, sqnr_db  # noqa: A004 -- the verb

MODES = pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
pytestmark = [
    pytest.mark.usefixtures("any_host"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@MODES
@pytest.mark.parametrize("is_per_channel", [False, True])
@pytest.mark.parametrize("way", ["option", "weights"])
def test_kernels_are_int8_and_exact(
    model: torch.nn.Module, batch: torch.Tensor, is_dynamic: bool, is_per_channel: bool, way: str
) -> None:
    float_dtype: Any = torch.bfloat16 if way == "option" else "float32"
    backend = ArmInductorBackend(
        is_dynamic=is_dynamic, is_per_channel=is_per_channel, float_dtype=float_dtype
    )
    wanted = model(batch)
    if way == "weights":
        # A copy: the model is everyone's.
        state = {name: value.bfloat16() for name, value in model.state_dict().items()}
        model = type(model)().eval().bfloat16()
        model.load_state_dict(state)
        batch = batch.bfloat16()
    reference = quantize(model, batch, backend, [batch])
    assert all(layer.is_int8 for layer in audit(reference, backend).layers)
    check_exactness(reference, lower(reference, backend), (batch,)).raise_if_inexact()
    result = reference(batch)
    assert result.dtype is torch.bfloat16
    assert sqnr_db(result.float(), wanted) > 20


@MODES
def test_compiled(model: torch.nn.Module, batch: torch.Tensor, is_dynamic: bool) -> None:
    backend = ArmInductorBackend(is_dynamic=is_dynamic, float_dtype="bfloat16")
    reference = quantize(model, batch, backend, [batch])
    compiled = compile(reference, backend)
    check_exactness(reference, compiled, (batch,)).raise_if_inexact()
    assert compiled(batch).dtype is torch.bfloat16
