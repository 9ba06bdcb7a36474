"""Compares whole models over all data: float, reference and compiled, and the user's own metric."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from versatil_core._torch_compat import tree_leaves
from versatil_core.errors import ReportError
from versatil_core.export import ModelInputs
from versatil_core.number_text import shape_text
from versatil_core.recorded_values import own_inputs
from versatil_core.report_result import MetricResult
from versatil_core.signal_to_noise import Energies, float_tensors, tree_energies

Model = Callable[..., Any]
Metric = Callable[[Model], "float | Mapping[str, float]"]


@dataclass
class OutputErrors:
    """Errors of the outputs of three models, added up over batches."""

    int8_to_float: Energies = field(default_factory=Energies)
    reference_to_float: Energies = field(default_factory=Energies)
    int8_to_reference: Energies = field(default_factory=Energies)
    dot: float = 0.0
    int8_energy: float = 0.0
    float_energy: float = 0.0
    max_error: float = 0.0
    float_elements: int = 0
    integer_elements: int = 0
    equal_integers: int = 0

    @property
    def has_floats(self) -> bool:
        """Whether the model has float outputs, so that errors mean something."""
        return self.float_elements > 0

    @property
    def equal_share(self) -> float | None:
        """Share of equal elements of integer and boolean outputs; None if there are none."""
        return self.equal_integers / self.integer_elements if self.integer_elements else None

    @property
    def cosine(self) -> float:
        """Cosine similarity of the int8 model's outputs and the float model's; 1 if both are zero."""
        norm = math.sqrt(self.int8_energy * self.float_energy)
        return self.dot / norm if norm else float(self.int8_energy == self.float_energy)

    def add(self, of_float: Any, of_reference: Any, of_int8: Any) -> None:
        """Add the outputs of one batch."""
        self.int8_to_float += tree_energies(of_int8, of_float)
        self.reference_to_float += tree_energies(of_reference, of_float)
        self.int8_to_reference += tree_energies(of_int8, of_reference)
        for got, wanted in zip(float_tensors(of_int8), float_tensors(of_float), strict=True):
            self.float_elements += wanted.numel()
            is_finite = torch.isfinite(got) & torch.isfinite(wanted)
            ours, theirs = got[is_finite].double(), wanted[is_finite].double()
            self.dot += float((ours * theirs).sum())
            self.int8_energy += float(ours.square().sum())
            self.float_energy += float(theirs.square().sum())
            if ours.numel():
                self.max_error = max(self.max_error, float((ours - theirs).abs().max()))
        for got, wanted in zip(_integers(of_int8), _integers(of_float), strict=True):
            self.integer_elements += wanted.numel()
            self.equal_integers += int((got == wanted).sum())
            if wanted.numel():
                difference = (got.long() - wanted.long()).abs().max()
                self.max_error = max(self.max_error, float(difference))


def output_errors(
    float_model: Model,
    reference: Model,
    int8_model: Model,
    calls: Sequence[ModelInputs],
    *,
    before_run: Callable[[], None] | None = None,
    on_batch: Callable[[], None] | None = None,
) -> OutputErrors:
    """Run three models on the same data.

    Args:
        float_model: The truth that the user cares for.
        reference: What int8 is meant to compute.
        int8_model: What computes it.
        calls: Inputs of all three.
        before_run: Called before each run, to put state back.
        on_batch: Called after each batch, for a progress bar.
    """
    errors = OutputErrors()
    with torch.no_grad():
        for call in calls:
            outputs = []
            for model in (float_model, reference, int8_model):
                if before_run is not None:
                    before_run()
                outputs.append(run_on(model, call))
            errors.add(*outputs)
            if on_batch is not None:
                on_batch()
    return errors


def run_on(model: Model, call: ModelInputs) -> Any:
    """Run a model on copies of the inputs, to which it may write."""
    own = own_inputs(call)
    return model(*own.args, **own.kwargs)


def check_alike(float_model: Model, reference: Model, call: ModelInputs) -> None:
    """Refuse a float model that can't be the one that the reference was made of.

    Raises:
        ReportError: It fails on the data, or returns tensors of other shapes.
    """
    with torch.no_grad():
        try:
            of_float = run_on(float_model, call)
        except Exception as error:
            raise ReportError(
                f"the float model fails on the first batch: {type(error).__name__}: {error}. The "
                f"data fit the quantized model: is it the model that was quantized?"
            ) from error
        of_reference = run_on(reference, call)
    wanted, found = (_shapes(outputs) for outputs in (of_reference, of_float))
    if wanted != found:
        raise ReportError(
            f"the float model returns {_shape_text(found)}, and the quantized one {_shape_text(wanted)}: "
            f"it is not the model that was quantized"
        )


def measure_metric(metric: Metric, models: Mapping[str, Model]) -> tuple[MetricResult, ...]:
    """Ask the user's metric about the float model and the int8 model.

    Args:
        metric: Takes a model, called as the original one is, and returns a number, or numbers by name.
        models: ``"float"`` and ``"int8"``.

    Raises:
        ReportError: The metric raises, or does not return finite numbers.
    """
    found = {which: _metric_values(metric, which, model) for which, model in models.items()}
    of_float, of_int8 = found["float"], found["int8"]
    if of_float.keys() != of_int8.keys():
        raise ReportError(
            f"metric {_name(metric)} returned {', '.join(of_float)} for the float model, and "
            f"{', '.join(of_int8)} for the int8 one"
        )
    return tuple(MetricResult(name, value, of_int8[name]) for name, value in of_float.items())


def check_metric(metric: Metric, float_model: Model) -> None:
    """Ask the user's metric about the float model, before much time is spent.

    Raises:
        ReportError: The metric raises, or does not return finite numbers.
    """
    _metric_values(metric, "float", float_model)


def _metric_values(metric: Metric, which: str, model: Model) -> dict[str, float]:
    try:
        with torch.no_grad():
            result = metric(model)
        if isinstance(model, torch.nn.Module):
            model.eval()  # the metric may have changed the mode
        values = dict(result) if isinstance(result, Mapping) else {_name(metric): result}
        numbers = {str(name): float(value) for name, value in values.items()}
    except Exception as error:
        raise ReportError(
            f"metric {_name(metric)} failed on the {which} model: {type(error).__name__}: {error}. It "
            f"takes a model, and returns a number, or a mapping of names to numbers"
        ) from error
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ReportError(
                f"metric {_name(metric)} returned {name} = {number} for the {which} model"
            )
    return numbers


def _name(metric: Metric) -> str:
    return str(getattr(metric, "__name__", type(metric).__name__))


def _shapes(outputs: Any) -> list[tuple[int, ...]]:
    leaves = tree_leaves(outputs)
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _integers(outputs: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return [each for each in tensors if not (each.is_floating_point() or each.is_complex())]


def _shape_text(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(shape_text(shape) or "a scalar" for shape in shapes) or "no tensor"
