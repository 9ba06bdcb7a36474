"""The Arm backend keeps the contract: one half is the same on every machine, the other runs kernels."""

from typing import ClassVar

import pytest

from versatil_arm import ArmInductorBackend
from versatil_core.testing import KernelConformance, PortableConformance


@pytest.mark.portable
class TestPortable(PortableConformance):
    backend_class = ArmInductorBackend
    option_sets: ClassVar = (
        {},
        {"is_dynamic": True, "is_per_channel": False, "activation_dtype": "uint8"},
    )


@pytest.mark.arm
class TestKernels(KernelConformance):
    backend_class = ArmInductorBackend
    # One only, since each compilation takes up to a minute under emulation; test_kernels.py has the others.
    option_sets: ClassVar = ({},)
    must_run_kernels = True
