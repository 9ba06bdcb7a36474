"""The versions of torch and torchao that the test matrix has proved."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from versatil_core.errors import UnsupportedVersionError

# The only place in the code: the ranges in pyproject.toml are checked against it.
SUPPORTED_VERSIONS = MappingProxyType(
    {
        # 2.9 is the oldest torch.export whose module checks its inputs (guards).
        "torch": ">=2.9,<2.16",
        # 0.15 is the first torchao with a pt2e flow of its own for torch 2.9.
        "torchao": ">=0.15,<0.19",
    }
)
ALLOW_UNTESTED_VERSIONS = "VERSATIL_ALLOW_UNTESTED_VERSIONS"


def check_versions() -> None:
    """Check once that the installed torch and torchao are ones we have tested.

    Every workflow function calls this at its start, so that importing stays free of checks.

    Raises:
        UnsupportedVersionError: torch or torchao is missing or outside the tested range, and
            the variable ``VERSATIL_ALLOW_UNTESTED_VERSIONS`` is not ``1``.
    """
    if os.environ.get(ALLOW_UNTESTED_VERSIONS) != "1":
        _check_installed()


@cache
def _check_installed() -> None:
    for distribution, supported in SUPPORTED_VERSIONS.items():
        check_version(distribution, installed_version(distribution), supported)


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution.

    Raises:
        UnsupportedVersionError: It is not installed.
    """
    try:
        return version(distribution)
    except PackageNotFoundError as error:
        supported = SUPPORTED_VERSIONS.get(distribution, "")
        raise UnsupportedVersionError(
            f"{distribution} is not installed. Run: pip install '{distribution}{supported}'",
            distribution=distribution,
            version="not installed",
            supported=supported,
        ) from error


def check_version(distribution: str, installed: str, supported: str) -> None:
    """Check one version against a range; nightly builds of a version in range are fine.

    Args:
        distribution: Name for the message.
        installed: A version, perhaps with a local part such as ``+cpu``.
        supported: A version specifier.

    Raises:
        UnsupportedVersionError: ``installed`` is outside ``supported``.
    """
    if SpecifierSet(supported).contains(Version(installed).public, prereleases=True):
        return
    raise UnsupportedVersionError(
        f"{distribution} {installed} is installed, but versatil is tested with "
        f"{distribution} {supported}. Run: pip install '{distribution}{supported}', or set "
        f"{ALLOW_UNTESTED_VERSIONS}=1 to try it all the same",
        distribution=distribution,
        version=installed,
        supported=supported,
    )
