"""The versions of torch that the test matrix has proved."""

import os

import torch

from versatil_passes.errors import UnsupportedVersionError

# The only place in the code: the ranges in each pyproject.toml are checked against it.
OLDEST_TORCH, NEWEST_TORCH = (2, 9), (2, 15)
SUPPORTED_TORCH = f">=2.{OLDEST_TORCH[1]},<2.{NEWEST_TORCH[1] + 1}"
ALLOW_UNTESTED_VERSIONS = "VERSATIL_ALLOW_UNTESTED_VERSIONS"


def check_torch() -> None:
    """Check that this torch is one we have tested.

    ``Int8Lowering`` and ``pass_slots`` do so when they are called, so that importing stays free of checks.

    Raises:
        UnsupportedVersionError: It is not, and the variable ``VERSATIL_ALLOW_UNTESTED_VERSIONS`` is not ``1``.
    """
    version = str(torch.__version__)
    minor = tuple(int(part) for part in version.split(".")[:2])
    if OLDEST_TORCH <= minor <= NEWEST_TORCH or is_anything_allowed():
        return
    raise UnsupportedVersionError(
        f"torch {version} is installed, but versatil is tested with torch {SUPPORTED_TORCH}. Run: "
        f"pip install 'torch{SUPPORTED_TORCH}', or set {ALLOW_UNTESTED_VERSIONS}=1 to try it all the same",
        distribution="torch",
        version=version,
        supported=SUPPORTED_TORCH,
    )


def is_anything_allowed() -> bool:
    """Whether the user insists on versions that we have not tested."""
    return os.environ.get(ALLOW_UNTESTED_VERSIONS) == "1"
