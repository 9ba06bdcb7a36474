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
