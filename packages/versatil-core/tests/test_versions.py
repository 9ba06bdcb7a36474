"""Untested versions of torch and torchao are refused, unless the user insists."""

from collections.abc import Callable
from importlib.metadata import requires
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

import versatil_core as core
from versatil_core import UnsupportedVersionError, versions


@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", "2.15.3", "2.14.0.dev20260601"])
def test_versions_in_range(version: str) -> None:
    versions.check_version("torch", version, ">=2.9,<2.16")


@pytest.mark.parametrize("version", ["2.8.1", "2.16.0", "3.0", "2.16.0.dev20270101+cpu"])
def test_versions_outside_the_range(version: str) -> None:
    with pytest.raises(UnsupportedVersionError) as error:
        versions.check_version("torch", version, ">=2.9,<2.16")

    assert error.value.version == version
    for part in (version, ">=2.9,<2.16", "pip install", "VERSATIL_ALLOW_UNTESTED_VERSIONS=1"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({"torch": "2.13.0", "torchao": "1.0"}, r"torchao 1\.0 is installed"),
        ({"torch": "2.13.0", "torchao": "0.17.0"}, r"pip install 'torchao==0\.18\.\*'"),
    ],
    ids=["range", "pair"],
)
def test_the_installed_ones_are_checked(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(versions, "installed_version", installed.__getitem__)
    versions._check_installed.cache_clear()
    try:
        with pytest.raises(UnsupportedVersionError, match=message):
            versions.check_versions()
        monkeypatch.setenv("VERSATIL_ALLOW_UNTESTED_VERSIONS", "1")
        versions.check_versions()
    finally:
        versions._check_installed.cache_clear()


@pytest.mark.parametrize(
    ("torch", "torchao"), [("2.9.1", "0.15.0"), ("2.13.0+cpu", "0.18.3"), ("2.15.0", "0.18.0")]
)
def test_pairs_that_go_together(torch: str, torchao: str) -> None:
    versions.check_pair(torch, torchao)


@pytest.mark.parametrize(("torch", "torchao"), [("2.11.0", "0.15.0"), ("2.13.0", "0.17.0")])
def test_pairs_that_do_not(torch: str, torchao: str) -> None:
    """The first fails when torchao is imported, the second in convert_pt2e."""
    with pytest.raises(
        UnsupportedVersionError, match="VERSATIL_ALLOW_UNTESTED_VERSIONS=1"
    ) as error:
        versions.check_pair(torch, torchao)

    assert error.value.distribution == "torchao"
    assert error.value.supported in str(error.value)


def test_a_missing_distribution_says_what_to_install() -> None:
    with pytest.raises(UnsupportedVersionError, match="pip install 'versatil-no-such-thing'"):
        versions.installed_version("versatil-no-such-thing")


def test_the_package_asks_for_the_same_ranges() -> None:
    asked = {r.name: r.specifier for r in map(Requirement, requires("versatil-core") or ())}

    for distribution, supported in versions.SUPPORTED_VERSIONS.items():
        assert asked[distribution] == Requirement(f"x{supported}").specifier


USES: dict[str, Callable[[torch.fx.GraphModule, Any], object]] = {
    "export": lambda module, _: core.export(module, torch.ones(1, 2)),
    "prepare": core.prepare,
    "calibrate": lambda module, _: core.calibrate(module, [torch.ones(1, 2)], torch.ones(1, 2)),
    "convert": lambda module, _: core.convert(module),
    "quantize": lambda module, backend: core.quantize(module, torch.ones(1, 2), backend),
    "audit": core.audit,
    "lower": core.lower,
    "compile": core.compile,
    "environment_context": lambda _, backend: backend.environment_context().__enter__(),
    "activate_environment": lambda _, backend: backend.activate_environment(),
    "save": lambda module, _: core.save(module, "never.pt2"),
    "load": lambda _, __: core.load("never.pt2"),
}


@pytest.mark.parametrize("use", USES)
def test_the_first_use_is_refused_whatever_it_is(
    monkeypatch: pytest.MonkeyPatch, linear_backend: Callable[..., Any], use: str
) -> None:
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    installed = {"torch": "2.13.0", "torchao": "0.17.0"}
    monkeypatch.setattr(versions, "installed_version", installed.__getitem__)
    versions._check_installed.cache_clear()
    try:
        with pytest.raises(UnsupportedVersionError, match=r"torchao 0\.17\.0 is installed"):
            USES[use](module, linear_backend())
    finally:
        versions._check_installed.cache_clear()
