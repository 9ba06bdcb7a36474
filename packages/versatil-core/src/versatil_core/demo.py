"""Quantize a real model and measure what came of it: what ``versatil demo`` shows."""

import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import torch

from versatil_core.audit import audit
from versatil_core.backend import BasePT2EBackend
from versatil_core.compile import compile as compile_int8
from versatil_core.demo_digits import digits_subject
from versatil_core.demo_minilm import minilm_subject
from versatil_core.demo_result import DeclinedLayer, DemoResult
from versatil_core.demo_subject import Subject
from versatil_core.exactness import check_exactness
from versatil_core.export import ModelInputs
from versatil_core.float_program import save_float_program
from versatil_core.host import read_host
from versatil_core.latency import LatencyComparison, measure_interleaved, timed
from versatil_core.lower import lower
from versatil_core.progress import StageProgress
from versatil_core.quantize import quantize
from versatil_core.saved_reference import save
from versatil_core.signal_to_noise import sqnr_db
from versatil_core.speed import compile_float

__all__ = ["SUBJECTS", "run_demo"]

SUBJECTS: MappingProxyType[str, Callable[[StageProgress], Subject]] = MappingProxyType(
    {"digits": digits_subject, "minilm": minilm_subject}
)
ROUNDS = 40
Model = Callable[..., torch.Tensor]


def run_demo(name: str, backend: BasePT2EBackend, progress: StageProgress) -> DemoResult:
    """Quantize, compile and measure one of the `SUBJECTS`.

    Args:
        name: ``"digits"`` or ``"minilm"``.
        backend: What to quantize for; it must run on this machine.
        progress: Shows the stages.

    Returns:
        The measurements.

    Raises:
        DemoExtraMissingError: A package that the subject needs isn't installed.
    """
    subject = SUBJECTS[name](progress)
    example = subject.held_out[0]
    with progress.stage("calibrate and quantize"):
        reference = quantize(subject.model, example, backend, subject.calibration)
    with progress.stage("compile the float model"), torch.no_grad():
        float_model = compile_float(subject.model, backend, ModelInputs(example, {}))
    with progress.stage("compile the int8 model"):
        int8_model: Model = compile_int8(reference, backend)
        int8_model(*example)
    with progress.stage("run the held-out data", total=3) as advance:
        float_out = _outputs(float_model, subject, advance)
        int8_out = _outputs(int8_model, subject, advance)
        reference_out = _outputs(reference, subject, advance)
    with progress.stage("compare op by op with the reference"):
        exactness = check_exactness(reference, lower(reference, backend), example)
    with progress.stage("measure the latency", total=ROUNDS) as advance:
        latency = _latency(float_model, int8_model, example, advance)
    with progress.stage("write both to disk and audit"):
        float_bytes, int8_bytes = _sizes(subject, reference)
        layers = audit(reference, backend).layers
    answers = subject.answers(float_out), subject.answers(int8_out)
    sqnr_reference = sqnr_db(int8_out, reference_out)
    return DemoResult(
        title=subject.title,
        held_out=subject.held_out_name,
        float_accuracy=_fraction(subject.is_right(answers[0])),
        int8_accuracy=_fraction(subject.is_right(answers[1])),
        same_answers=_fraction(answers[0] == answers[1]),
        sqnr_float=sqnr_db(int8_out, float_out),
        sqnr_reference=None if sqnr_reference == float("inf") else sqnr_reference,
        exact_ops=len(exactness.ops) - len(exactness.disagreements),
        ops=len(exactness.ops),
        float_latency=latency.by_name["float"].timing,
        int8_latency=latency.by_name["int8"].timing,
        speedup=latency.ratio("float", "int8"),
        rounds=ROUNDS,
        batch=tuple(tuple(tensor.shape) for tensor in example),
        threads=torch.get_num_threads(),
        float_bytes=float_bytes,
        int8_bytes=int8_bytes,
        int8_layers=sum(layer.is_int8 for layer in layers),
        layers=len(layers),
        declined=tuple(
            DeclinedLayer(layer.module_path, layer.op, layer.reason or "")
            for layer in layers
            if not layer.is_int8
        ),
        backend=repr(backend),
        host=read_host(),
        versions={name: version(name) for name in ("versatil-core", "torch", "torchao")},
    )


def _outputs(model: Model, subject: Subject, advance: Callable[[], None]) -> torch.Tensor:
    with torch.no_grad():
        outputs = torch.cat([model(*batch) for batch in subject.held_out])
    advance()
    return outputs


def _latency(
    float_model: Model,
    int8_model: Model,
    example: tuple[torch.Tensor, ...],
    advance: Callable[[], None],
) -> LatencyComparison:
    with torch.no_grad():
        candidates = {
            "float": timed(lambda: float_model(*example)),
            "int8": timed(lambda: int8_model(*example)),
        }
        return measure_interleaved(candidates, rounds=ROUNDS, on_round=advance)


def _sizes(subject: Subject, reference: torch.fx.GraphModule) -> tuple[int, int]:
    """Return the bytes that the float program and the reference take, in the same format."""
    with tempfile.TemporaryDirectory() as folder:
        float_path, int8_path = Path(folder) / "float.pt2", Path(folder) / "int8.pt2"
        save_float_program(subject.model, ModelInputs(subject.held_out[0], {}), float_path)
        save(reference, int8_path)
        return float_path.stat().st_size, int8_path.stat().st_size


def _fraction(flags: torch.Tensor) -> float:
    return float(flags.double().mean())
