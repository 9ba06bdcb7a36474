"""What a demo measured."""

from dataclasses import asdict, dataclass
from typing import Any

from versatil_core.host import Host
from versatil_core.latency import Timing

__all__ = ["DeclinedLayer", "DemoResult"]


@dataclass(frozen=True)
class DeclinedLayer:
    """A layer that stays float, and why."""

    module_path: str
    op: str
    reason: str


@dataclass(frozen=True)
class DemoResult:
    """What one demo measured.

    Attributes:
        title: The model in a few words.
        held_out: What the accuracy is measured on.
        float_accuracy: Fraction of right answers of the float model.
        int8_accuracy: The same for the compiled int8 model.
        same_answers: Fraction of answers that are the same for both.
        sqnr_float: Of the int8 outputs against the float outputs, in dB.
        sqnr_reference: Of the int8 outputs against the reference's, in dB; None if equal.
        exact_ops: Operations that give what the reference's do when fed the same inputs.
        ops: All operations that were compared so.
        float_latency: Of the float model, compiled and frozen.
        int8_latency: Of the int8 model, measured in turns with the other.
        speedup: Median over the rounds of float latency / int8 latency.
        rounds: Number of rounds that the two took turns.
        batch: Shapes of the inputs that were timed.
        threads: Threads that torch used.
        float_bytes: Size of the exported float program on disk.
        int8_bytes: Size of the saved reference on disk.
        int8_layers: Layers that run on an int8 kernel.
        layers: All layers in the audit.
        declined: The others.
        backend: The backend with its options.
        host: This machine.
        versions: Distribution -> version.
    """

    title: str
    held_out: str
    float_accuracy: float
    int8_accuracy: float
    same_answers: float
    sqnr_float: float
    sqnr_reference: float | None
    exact_ops: int
    ops: int
    float_latency: Timing
    int8_latency: Timing
    speedup: float
    rounds: int
    batch: tuple[tuple[int, ...], ...]
    threads: int
    float_bytes: int
    int8_bytes: int
    int8_layers: int
    layers: int
    declined: tuple[DeclinedLayer, ...]
    backend: str
    host: Host
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return asdict(self)
