"""Which machine a measurement was made on."""

from versatil_core.host import read_host


def cpu_text() -> str:
    """The processor, and those of its instruction sets that matter to int8."""
    host = read_host()
    return f"{host.cpu} ({', '.join(host.features)})"
