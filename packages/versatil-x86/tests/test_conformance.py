"""The x86 backend keeps the contract, with the options that are right on the CPU at hand."""

import os
import subprocess
import sys
from typing import ClassVar

from versatil_core.testing import BackendConformance
from versatil_x86 import X86InductorBackend


class TestConformance(BackendConformance):
    backend_class = X86InductorBackend
    # Without VNNI, the default saturates, as torchao's does; "auto" is exact on every CPU.
    option_sets: ClassVar = (
        {"saturation": "auto"},
        {"saturation": "auto", "is_dynamic": True},
    )
    must_run_kernels = True


CODE = """
from versatil_core import InexactError
from versatil_core.conformance_models import CASES
from versatil_core.testing import KernelConformance
from versatil_x86 import X86InductorBackend

KernelConformance.backend_class = X86InductorBackend
case = next(case for case in CASES if case.name == "largest sums")
KernelConformance().test_every_op_is_exact({"saturation": "safe"}, case)
try:
    KernelConformance().test_every_op_is_exact({"saturation": "ignore"}, case)
except InexactError as error:
    print([op.node for op in error.report.disagreements])
"""


def test_the_suite_notices_sums_that_saturate() -> None:
    """On a CPU without VNNI, which oneDNN can be told to take this one for."""
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1:] == ["['conv2d', 'linear']"]
