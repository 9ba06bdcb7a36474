"""torch.compile(backend="versatil_arm") is found by torch, and needs an Arm CPU only to run."""

from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch
from torch._dynamo.backends.registry import list_backends

from versatil_arm import ArmInductorBackend
from versatil_arm.dynamo import versatil_arm
from versatil_core import UnsupportedHostError, quantize

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def test_it_is_registered() -> None:
    try:
        distribution("versatil-arm")
    except PackageNotFoundError:
        pytest.skip("runs on the sources: entry points belong to an installed distribution")
    assert "versatil_arm" in list_backends()


def test_another_machine_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    reference = quantize(torch.nn.Linear(16, 4), X, ArmInductorBackend(), [X])

    with pytest.raises(UnsupportedHostError, match="aarch64"):
        versatil_arm(reference, [X])
