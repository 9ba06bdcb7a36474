"""The demo's run on a subject that is trained by nobody and compiles in seconds."""

import json
import math

import pytest
import torch
from torch import nn

from versatil_core import BasePT2EBackend, demo, sqnr_db
from versatil_core.demo import run_demo
from versatil_core.demo_subject import DemoExtraMissingError, Subject, require_extra
from versatil_core.progress import StageProgress
from versatil_passes.errors import VersatilError


def tiny_subject(progress: StageProgress) -> Subject:
    with progress.stage("make"):
        generator = torch.Generator().manual_seed(0)
        batches = torch.split(torch.randn(12, 8, generator=generator), 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).eval()
    return Subject(
        title="a tiny net",
        model=model,
        calibration=tuple((batch,) for batch in batches),
        held_out=((batches[1],), (batches[2],)),
        held_out_name="8 unseen rows",
        answers=lambda outputs: outputs.argmax(dim=1),
        is_right=lambda answers: answers >= 0,
    )


@pytest.mark.filterwarnings("default")  # torch deprecates what its own compiler uses
def test_run_demo(monkeypatch: pytest.MonkeyPatch, linear_backend: type[BasePT2EBackend]) -> None:
    monkeypatch.setattr(demo, "SUBJECTS", {"tiny": tiny_subject})
    monkeypatch.setattr(demo, "ROUNDS", 3)
    result = run_demo("tiny", linear_backend(), StageProgress(None))
    assert result.float_accuracy == result.int8_accuracy == 1.0
    assert result.int8_layers == result.layers == 2
    assert result.declined == ()
    assert result.exact_ops == result.ops >= 2
    assert result.sqnr_float > 20
    assert result.sqnr_reference is None or result.sqnr_reference > 60
    assert result.speedup > 0
    assert result.float_latency.low <= result.float_latency.median <= result.float_latency.high
    assert result.batch == ((4, 8),)
    assert result.float_bytes > 0 < result.int8_bytes
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["rounds"] == 3


def test_sqnr_of_equal_outputs_is_infinite() -> None:
    assert sqnr_db(torch.ones(3), torch.ones(3)) == math.inf
    assert sqnr_db(torch.tensor([1.1]), torch.tensor([1.0])) == pytest.approx(20, abs=1e-4)


def test_a_missing_extra_names_the_command() -> None:
    require_extra("json", "torch")
    with pytest.raises(DemoExtraMissingError, match=r'pip install "versatil-core\[demo\]"') as e:
        require_extra("json", "package_of_the_extra")
    assert e.value.package == "package_of_the_extra"
    assert isinstance(e.value, VersatilError)
