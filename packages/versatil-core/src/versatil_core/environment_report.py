"""What it takes to repeat a measurement: machine, versions, settings, options, calibration."""

import os
from datetime import UTC, datetime

import psutil
import torch
from torch.fx import GraphModule

from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.discovery import installed_backends
from versatil_core.host import read_host
from versatil_core.manifest import current_versions
from versatil_core.reference_info import reference_info
from versatil_core.report_result import Environment

# By these, libraries change threads, kernels or memory.
_PREFIXES = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "TORCHINDUCTOR_", "TORCHDYNAMO_"),
    *("LD_PRELOAD", "MALLOC_"),
)


def environment_of(reference: GraphModule, backend: BasePT2EBackend, command: str) -> Environment:
    """Describe this process and what it measures.

    Args:
        reference: Says how it was made.
        backend: What it is compiled with.
        command: How the measurement was asked for.
    """
    info = reference_info(reference)
    packages = {
        entry.distribution: entry.version
        for entry in installed_backends()
        if entry.name == backend.name
    }
    return Environment(
        host=read_host(),
        versions={**current_versions(), **packages},
        backend=backend.name,
        options=backend_options(backend),
        option_reasons=dict(backend.option_reasons),
        settings=backend.inductor_settings.as_texts(),
        variables={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
        threads=torch.get_num_threads(),
        load_average=round(psutil.getloadavg()[0], 2),
        calibration_batches=info.calibration_batches,
        quantized_with=info.versions,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
    )
