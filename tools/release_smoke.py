"""Import what is installed of ours, and let each backend quantize and run a small model.

Run by tools/release.py in a clean environment, where siblings of several ages meet::

    python release_smoke.py PACKAGE PUBLIC_API_FILE

The public API of PACKAGE has to be what the file says. It uses only functions
that the first release had.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from public_api import describe, public_values


def import_ours() -> Iterator[str]:
    """Import every distribution of ours with all its names; yield name and version."""
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name.startswith("versatil-"):
            public_values(name.replace("-", "_"), below=())  # an older one may have less below
            yield f"{name} {distribution.version}"


def run_backends() -> Iterator[str]:
    """Quantize a model with each backend, and lower it where this CPU is one of its own."""
    core = import_module("versatil_core")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    inputs = (torch.randn(32, 64, generator=torch.Generator().manual_seed(0)),)
    for entry in core.installed_backends():
        backend = core.create_backend(entry.name)
        is_at_home = platform.machine() in backend.lowering_rules.machine_types
        if is_at_home:  # with the options that are right on this CPU
            backend = core.host_backend(entry.name)
        reference = core.quantize(model.eval(), inputs, backend, calibration=[inputs])
        if not is_at_home:
            yield f"{entry.name}: quantized, not run on {platform.machine()}"
            continue
        core.check_exactness(reference, core.lower(reference, backend), inputs).raise_if_inexact()
        layers = core.audit(reference, backend).int8_count
        if layers != 2:
            sys.exit(f"{entry.name}: {layers} of 2 layers are int8")
        yield f"{entry.name}: 2 of 2 layers int8, exact"


def main() -> None:
    """Do both; print what was done."""
    package, manifest = sys.argv[1:]
    print(", ".join(sorted(import_ours())))
    if describe(package) != Path(manifest).read_text(encoding="utf-8"):
        sys.exit(f"{package}: run `python tools/public_api.py --write` and review the diff")
    if find_spec("versatil_core"):
        print("\n".join(run_backends()) or "no backend is installed")


if __name__ == "__main__":
    main()
