"""torch.compile(backend="versatil_x86") works with nothing of ours imported."""

import subprocess
import sys
from pathlib import Path

import torch
from torch._dynamo.backends.registry import list_backends

from versatil_core import quantize, save
from versatil_x86 import X86InductorBackend

CODE = """
import sys
import torch
from torch._inductor.utils import run_and_get_code

program, inputs = sys.argv[1:]
reference = torch.export.load(program).module()
x = torch.load(inputs)
assert not any(name.startswith("versatil") for name in sys.modules)
compiled = torch.compile(reference, backend="versatil_x86")
with torch.no_grad():
    got, code = run_and_get_code(compiled, x)
assert "qlinear_pointwise" in "".join(code)
torch.testing.assert_close(got, reference(x), rtol=1e-3, atol=1e-3)
"""


def test_it_is_registered() -> None:
    assert "versatil_x86" in list_backends()


def test_a_saved_reference_in_a_fresh_process(tmp_path: Path) -> None:
    """Case 28."""
    x = torch.randn(4, 16)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    save(quantize(model, x, X86InductorBackend(reduce_range=True), [x]), tmp_path / "model.pt2")
    torch.save(x, tmp_path / "x.pt")
    register = "import torch.ao.quantization.fx._decomposed\n"

    result = subprocess.run(
        [sys.executable, "-c", register + CODE, tmp_path / "model.pt2", tmp_path / "x.pt"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
