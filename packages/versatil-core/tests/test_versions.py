"""Untested versions of torch and torchao are refused, unless the user insists."""

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

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


def test_the_installed_ones_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda _: "1.0")
    versions._check_installed.cache_clear()
    try:
        with pytest.raises(UnsupportedVersionError, match=r"torch 1\.0 is installed"):
            versions.check_versions()
        monkeypatch.setenv("VERSATIL_ALLOW_UNTESTED_VERSIONS", "1")
        versions.check_versions()
    finally:
        versions._check_installed.cache_clear()


def test_a_missing_distribution_says_what_to_install() -> None:
    with pytest.raises(UnsupportedVersionError, match="pip install 'versatil-no-such-thing'"):
        versions.installed_version("versatil-no-such-thing")


def test_the_package_asks_for_the_same_ranges() -> None:
    asked = {r.name: r.specifier for r in map(Requirement, requires("versatil-core") or ())}

    for distribution, supported in versions.SUPPORTED_VERSIONS.items():
        assert asked[distribution] == Requirement(f"x{supported}").specifier
