"""Compiled for Arm on this machine, whatever it is: what the kernels are on Arm is tested there."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from versatil_arm import ArmInductorBackend
from versatil_core import audit, compile, lower, quantize, sqnr_db  # noqa: A004 -- the verb

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


@pytest.mark.portable
@pytest.mark.usefixtures("any_host")
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_is_lowered(
    model: torch.nn.Module, batch: torch.Tensor, *, is_dynamic: bool
) -> None:
    """Inductor leaves each product of matrices whole, and fuses what is around it."""
    backend = ArmInductorBackend(is_dynamic=is_dynamic)
    reference = quantize(model, batch, backend, None if is_dynamic else [batch])
    lowered = lower(reference, backend)

    result, [code] = run_and_get_code(compile(reference, backend), batch)

    assert sqnr_db(result, lowered(batch)) > 60
    assert audit(reference, backend).int8_count == 6
    assert len(re.findall(r"aoti_torch_cpu__qlinear_pointwise\w*\(", code)) == 6
