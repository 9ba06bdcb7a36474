"""The versions of torch and torchao that the test matrix has proved."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from versatil_core.errors import UnsupportedVersionError
from versatil_passes.versions import (
    ALLOW_UNTESTED_VERSIONS,
    SUPPORTED_TORCH,
    check_torch,
    is_anything_allowed,
)

# What goes with what, by minor version. tools/compatibility.py compares it with the pairs that the
# tests run on: another torchao fails at import, or in convert_pt2e, or was never tried.
TORCHAO_FOR_TORCH = MappingProxyType(
    {
        "2.9": "0.15",
        "2.10": "0.16",
        "2.11": "0.17",
        "2.12": "0.17",
        "2.13": "0.18",
        "2.14": "0.18",
        "2.15": "0.18",
    }
)
# The only place in the code: the ranges in pyproject.toml are checked against it.
SUPPORTED_VERSIONS = MappingProxyType(
    {
        # 2.9 is the oldest torch.export whose module checks its inputs (guards).
        "torch": SUPPORTED_TORCH,
        # 0.15 is the first torchao with a pt2e flow of its own for torch 2.9.
        "torchao": ">=0.15,<0.19",
    }
)


def check_versions() -> None:
    """Check once that the installed torch and torchao are ones we have tested, together.

    Every workflow function calls this at its start, so that importing stays free of checks.

    Raises:
        UnsupportedVersionError: torch or torchao is missing or outside the tested range, or they
            are not a tested pair, and ``VERSATIL_ALLOW_UNTESTED_VERSIONS`` is not ``1``.
    """
    if not is_anything_allowed():
        _check_installed()


@cache
def _check_installed() -> None:
    check_torch()
    installed = {name: installed_version(name) for name in SUPPORTED_VERSIONS}
    for name, supported in SUPPORTED_VERSIONS.items():
        check_version(name, installed[name], supported)
    check_pair(**installed)


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


def check_pair(torch: str, torchao: str) -> None:
    """Check that a torch and a torchao, each in range, go together.

    Args:
        torch: Version of torch.
        torchao: Version of torchao.

    Raises:
        UnsupportedVersionError: They do not.
    """
    wanted = TORCHAO_FOR_TORCH[minor(torch)]
    if minor(torchao) == wanted:
        return
    raise UnsupportedVersionError(
        f"torchao {torchao} is installed with torch {torch}, but versatil is tested with torchao "
        f"{wanted} there. Run: pip install 'torchao=={wanted}.*', or set "
        f"{ALLOW_UNTESTED_VERSIONS}=1 to try it all the same",
        distribution="torchao",
        version=torchao,
        supported=f"=={wanted}.*",
    )


def minor(version: str) -> str:
    """Return the first two numbers of a version.

    Example:
        >>> minor("2.13.0+cpu")
        '2.13'
    """
    return ".".join(map(str, Version(version).release[:2]))
