"""What a report holds: plain values, each section None until it was measured."""

import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from versatil_core.atomic_file import replacing
from versatil_core.exactness_report import (
    MAX_END_TO_END_LOSS_DB,
    MIN_END_TO_END_DB,
    MIN_FLOAT_DB,
)
from versatil_core.host import Host
from versatil_core.latency import Judgement, Timing
from versatil_core.layer_report import ActivationRange, LayerReport

__all__ = [
    "Accuracy",
    "Environment",
    "FirstResult",
    "Gate",
    "MetricResult",
    "Report",
    "Size",
    "SpeedPoint",
    "Timing",
    "Verdict",
    "VerdictCode",
]

FORMAT_VERSION = 1


class VerdictCode(StrEnum):
    """Whether quantizing was worth it; the first that applies."""

    INCOMPLETE = "incomplete"
    """The run was stopped before it had measured everything."""
    INEXACT = "inexact"
    """An int8 kernel does not give what the reference defines: nothing else counts."""
    NO_INT8 = "no_int8"
    """Not one layer runs as int8."""
    SLOWER = "slower"
    """In at least one configuration slower than the float model, compiled."""
    TOO_NOISY = "too_noisy"
    """The machine was too busy to tell."""
    SAME_SPEED = "same_speed"
    """In at least one configuration as fast as the float model, and in none slower."""
    FASTER = "faster"
    """In every configuration faster than the float model, compiled."""
    NOT_TIMED = "not_timed"
    """Speed was not asked for."""


@dataclass(frozen=True)
class Verdict:
    """The result in one code and one sentence."""

    code: VerdictCode
    sentence: str


@dataclass(frozen=True)
class Gate:
    """One condition that was asked for.

    Attributes:
        name: ``"min_speedup"``, ``"min_sqnr"`` or ``"require_int8"``.
        is_passed: Whether it holds.
        text: What was wanted and what was found.
    """

    name: str
    is_passed: bool
    text: str


@dataclass(frozen=True)
class MetricResult:
    """The user's own metric, of the float model and of the compiled int8 model."""

    name: str
    float_value: float
    int8_value: float


@dataclass(frozen=True)
class Accuracy:
    """Of whole models, over all batches.

    Attributes:
        batches: How many batches were run.
        samples: Sizes of their first axes, added up.
        layer_batches: On how many of them the layers were looked at.
        sqnr_db: Of the compiled int8 model against the float model, over float outputs; None if
            the model has none.
        reference_sqnr_db: Of the reference against the float model, likewise.
        kernels_sqnr_db: Of the compiled int8 model against the reference: ``inf`` if equal.
        cosine: Cosine similarity of the int8 model's float outputs and the float model's.
        max_error: Largest absolute difference to the float model, over all outputs.
        equal_share: Share of equal elements of integer and boolean outputs, int8 against float;
            None if the model has none.
        exact_ops: Operations that give what the reference's do when fed the same inputs.
        ops: All operations that were compared so.
        are_inputs_untouched: Whether no kernel wrote to an input.
        metrics: The user's own.
    """

    batches: int
    samples: int
    layer_batches: int
    sqnr_db: float | None
    reference_sqnr_db: float | None
    kernels_sqnr_db: float | None
    cosine: float | None
    max_error: float
    exact_ops: int
    ops: int
    are_inputs_untouched: bool = True
    equal_share: float | None = None
    metrics: tuple[MetricResult, ...] = ()

    @property
    def loss_db(self) -> float | None:
        """How much farther from float int8 is than the reference, in dB; None where that is no number."""
        if self.sqnr_db is None or self.reference_sqnr_db is None:
            return None
        loss = self.reference_sqnr_db - self.sqnr_db
        return None if math.isnan(loss) else loss

    @property
    def is_exact(self) -> bool:
        """Whether int8 gives what the reference defines, by the rules of :func:`versatil_core.check_exactness`.

        Results as near to the reference as another order of summation are no loss, however near to
        float the reference is.
        """
        near = self.kernels_sqnr_db
        if near is None or near >= MIN_FLOAT_DB:
            is_near = True
        elif self.loss_db is None:
            is_near = near >= MIN_END_TO_END_DB
        else:
            is_near = self.loss_db <= MAX_END_TO_END_LOSS_DB
        return self.exact_ops == self.ops and self.are_inputs_untouched and is_near


@dataclass(frozen=True)
class SpeedPoint:
    """One configuration in which the three models took turns.

    Attributes:
        threads: Threads that torch used.
        batch: Size of the first axis of the first input.
        input_shapes: Of every input.
        rounds: How often each had its turn.
        float_eager: Seconds per call of the float model, as it is.
        float_compiled: Of the float model under ``torch.compile``, frozen.
        int8: Of the quantized model.
        speedup: ``float_compiled / int8``, formed within each round.
        speedup_eager: ``float_eager / int8``, likewise.
        speedup_interval: Where the median of ``speedup`` lies with a confidence of 95 %.
        judgement: Of ``speedup``, see :func:`versatil_core.latency.judge`.
    """

    threads: int
    batch: int
    input_shapes: tuple[tuple[int, ...], ...]
    rounds: int
    float_eager: Timing
    float_compiled: Timing
    int8: Timing
    speedup: Timing
    speedup_eager: Timing
    speedup_interval: tuple[float, float]
    judgement: Judgement


@dataclass(frozen=True)
class FirstResult:
    """What a new process needs until it has a result, with nothing in the compiler's cache.

    Attributes:
        import_seconds: From the start of the process until everything is imported.
        load_seconds: To read the model file.
        compile_seconds: Of the first call, which compiles.
        total_seconds: From the start of the process to the first result.
    """

    import_seconds: float
    load_seconds: float
    compile_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class Size:
    """Bytes of the float model and of the quantized one.

    Attributes:
        float_file: Of the float program, as ``torch.export.save`` writes it.
        int8_file: Of the portable file.
        float_weights: Of parameters and buffers in memory.
        int8_weights: The same of the reference.
        float_call: Memory that one call of the compiled float model takes beyond what the
            process holds already; None where the system doesn't tell.
        int8_call: The same of the compiled int8 model.
        float_process: Most memory that the process of the float model has while it runs.
        int8_process: The same of the int8 model.
    """

    float_file: int
    int8_file: int
    float_weights: int
    int8_weights: int
    float_call: int | None = None
    int8_call: int | None = None
    float_process: int | None = None
    int8_process: int | None = None


@dataclass(frozen=True)
class Environment:
    """What it takes to repeat the measurement.

    Attributes:
        host: This machine.
        versions: Distribution -> version.
        backend: Name of the backend.
        options: Its options.
        option_reasons: Option -> why it has its value.
        settings: Inductor and environment values in force, as text.
        variables: Environment variables that change speed or kernels, as far as they are set.
        threads: Threads that torch uses by default.
        load_average: Processes that wanted to run, in the last minute before; None if unknown.
        calibration_batches: With how many batches the reference was calibrated.
        quantized_with: Distribution -> version with which it was quantized.
        date: In UTC, such as ``"2026-12-01T12:00:00+00:00"``.
        command: How the report was asked for.
    """

    host: Host
    versions: Mapping[str, str]
    backend: str
    options: Mapping[str, Any]
    option_reasons: Mapping[str, str]
    settings: Mapping[str, str]
    variables: Mapping[str, str]
    threads: int
    load_average: float | None
    calibration_batches: int
    quantized_with: Mapping[str, str]
    date: str
    command: str


@dataclass(frozen=True)
class Report:
    """What quantizing did to a model; ``print`` it for tables, see also :meth:`to_html`.

    Attributes:
        title: The model in a few words.
        verdict: The result in a sentence.
        environment: Where and with what it was measured.
        layers: Every layer that multiplies by weights, or matrices together, in running order.
        notes: What else there is to know: what was not measured and why, what may go wrong.
        accuracy: None if it was not asked for, or not yet measured.
        ranges: Of the activations with fixed scales; empty likewise, or if there are none.
        speed: One entry for each configuration; empty likewise.
        first_result: ``"float"`` and ``"int8"`` -> what a new process needs; empty likewise.
        size: None likewise.
        gates: The conditions that were asked for.
        unfinished: Stages that a stopped run didn't come to; empty for a whole report.
    """

    title: str
    verdict: Verdict
    environment: Environment
    layers: tuple[LayerReport, ...]
    notes: tuple[str, ...] = ()
    accuracy: Accuracy | None = None
    ranges: tuple[ActivationRange, ...] = ()
    speed: tuple[SpeedPoint, ...] = ()
    first_result: Mapping[str, FirstResult] = field(default_factory=dict)
    size: Size | None = None
    gates: tuple[Gate, ...] = ()
    unfinished: tuple[str, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether the run was stopped before its end."""
        return bool(self.unfinished)

    @property
    def int8_count(self) -> int:
        """How many layers run as int8."""
        return sum(layer.is_int8 for layer in self.layers)

    @property
    def losing_layers(self) -> tuple[LayerReport, ...]:
        """The int8 layers whose kernel takes longer than the float one, the worst first."""
        losing = [layer for layer in self.layers if layer.is_int8 and (layer.speedup or 1.0) < 1]
        return tuple(sorted(losing, key=_lost_seconds, reverse=True))

    @property
    def float_kernel_share(self) -> float | None:
        """Share of a call of the compiled float model that the kernels of its layers take.

        In the first configuration; None unless both were measured.
        """
        seconds = [layer.float_run.seconds for layer in self.layers if layer.float_run is not None]
        return (
            sum(seconds) / self.speed[0].float_compiled.median if seconds and self.speed else None
        )

    @property
    def int8_kernel_share(self) -> float | None:
        """The same of the int8 model."""
        seconds = [layer.int8_run.seconds for layer in self.layers if layer.int8_run is not None]
        return sum(seconds) / self.speed[0].int8.median if seconds and self.speed else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what JSON has no number for is ``"inf"``, ``"-inf"`` or ``"nan"``."""
        values: dict[str, Any] = _finite(
            {
                "format_version": FORMAT_VERSION,
                "is_partial": self.is_partial,
                **asdict(self),
                "is_exact": None if self.accuracy is None else self.accuracy.is_exact,
                "float_kernel_share": self.float_kernel_share,
                "int8_kernel_share": self.int8_kernel_share,
            }
        )
        return values

    def to_json(self) -> str:
        """Return :meth:`to_dict` as text, indented."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs no network and no other file, whole or not at all.

        Raises:
            ModelFileError: The file cannot be written.
        """
        from versatil_core.html_report import render_html

        with replacing(path) as file:
            file.write(render_html(self).encode())

    def __rich__(self) -> Any:
        """Tables for a rich console."""
        from versatil_core.report_tables import report_table

        return report_table(self)

    def __str__(self) -> str:
        """The same as text, 100 columns wide."""
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=100, no_color=True).print(self)
        return buffer.getvalue().rstrip()


def _lost_seconds(layer: LayerReport) -> float:
    assert layer.int8_run is not None
    assert layer.float_run is not None
    return layer.int8_run.seconds - layer.float_run.seconds


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_finite(item) for item in value]
    return value
