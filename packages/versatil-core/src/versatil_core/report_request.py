"""What a report is asked for."""

from dataclasses import dataclass
from enum import StrEnum

from versatil_core.model_accuracy import Metric


class Part(StrEnum):
    """What a report can be asked for."""

    KERNELS = "kernels"
    """Which kernel ran each layer, first result, memory; in processes of their own."""
    ACCURACY = "accuracy"
    SPEED = "speed"


ALL_PARTS = frozenset(Part)
ROUNDS = 30
MIN_ROUNDS = 6
"""Less don't give an interval of confidence, see :func:`versatil_core.latency.median_interval`."""


@dataclass(frozen=True)
class ReportRequest:
    """What to measure; see :func:`versatil_core.report`."""

    metric: Metric | None = None
    threads: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    rounds: int = ROUNDS
    parts: frozenset[Part] = ALL_PARTS
    title: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rounds < MIN_ROUNDS:
            raise ValueError(f"rounds={self.rounds}: at least {MIN_ROUNDS} are needed")
        for name in ("threads", "batch_sizes"):
            if any(number < 1 for number in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: each must be at least 1")
        if self.metric is not None and Part.ACCURACY not in self.parts:
            raise ValueError("a metric is part of the accuracy: add 'accuracy' to parts")
        if not self.parts:
            raise ValueError(f"parts is empty: name some of {', '.join(Part)}")
