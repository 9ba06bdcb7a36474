"""An untested torch is refused when a pass is made, unless the user insists."""

import pytest
import torch

import versatil_passes
from versatil_passes import Int8Lowering, LoweringRules, UnsupportedVersionError, versions


@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", "2.15.3", "2.14.0.dev20260601"])
def test_versions_in_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)

    versions.check_torch()


@pytest.mark.parametrize("version", ["2.8.1", "1.13.1", "2.16.0a0+git1234567", "3.0.0"])
def test_versions_outside_the_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)

    with pytest.raises(UnsupportedVersionError) as error:
        Int8Lowering(LoweringRules(machine_types=("x86_64",)))

    assert (error.value.version, error.value.supported) == (version, versions.SUPPORTED_TORCH)
    for part in (version, "pip install 'torch>=2.9,<2.16'", "VERSATIL_ALLOW_UNTESTED_VERSIONS=1"):
        assert part in str(error.value)
    monkeypatch.setenv("VERSATIL_ALLOW_UNTESTED_VERSIONS", "1")
    Int8Lowering(LoweringRules(machine_types=("x86_64",)))  # and no error


def test_the_error_is_an_import_error() -> None:
    assert issubclass(versatil_passes.UnsupportedVersionError, ImportError)


def test_passes_of_ones_own_are_not_installed_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")

    with (
        pytest.raises(UnsupportedVersionError, match=r"torch 2\.16\.0"),
        versatil_passes.pre_grad_passes(lambda _: None),
    ):
        pass
