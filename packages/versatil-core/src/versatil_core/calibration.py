"""Shows data to a prepared model, and checks every batch before it does."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from versatil_core.batch_check import BatchError, checked_call
from versatil_core.errors import CalibrationError
from versatil_core.export import ModelInputs, input_specs, model_inputs
from versatil_core.reference_info import InputSpec
from versatil_core.versions import check_versions

_SETTLED = 0.01


def calibrate(
    prepared: torch.fx.GraphModule,
    batches: Iterable[Any],
    example_inputs: Any,
    *,
    input_names: Sequence[str] = (),
    observe_layers: bool = True,
) -> int:
    """Run batches through a prepared model, so that its observers see the ranges.

    Args:
        prepared: From :func:`versatil_core.prepare.prepare`; its observers are updated.
        batches: Each is a tensor, a tuple or list of inputs, or a mapping of inputs by name.
        example_inputs: The inputs that the model was exported with.
        input_names: Names of the model's positional inputs, so that a mapping fits them too.
        observe_layers: Whether to show each ``LayerObserver`` what its layer gets.

    Returns:
        The number of batches.

    Raises:
        CalibrationError: There is no batch, or one does not fit the exported model or has NaN
            or infinity in it; says which and what to do.
        UnsupportedVersionError: torch and torchao are not a pair that is tested.
    """
    check_versions()
    seen = show_batches(
        prepared, batches, example_inputs, input_names=input_names, observe_layers=observe_layers
    )
    return seen.batches


@dataclass(frozen=True)
class CalibrationData:
    """How much calibration saw.

    Attributes:
        batches: How many batches.
        samples: How many samples: the first sizes of the first input, added up.
    """

    batches: int
    samples: int


def show_batches(
    prepared: torch.fx.GraphModule,
    batches: Iterable[Any],
    example_inputs: Any,
    *,
    input_names: Sequence[str] = (),
    observe_layers: bool = True,
    patience: int | None = None,
) -> CalibrationData:
    """Do what :func:`calibrate` does, until the ranges settle.

    Args:
        prepared: As for :func:`calibrate`.
        batches: As for :func:`calibrate`.
        example_inputs: As for :func:`calibrate`.
        input_names: As for :func:`calibrate`.
        observe_layers: As for :func:`calibrate`.
        patience: Stop after so many batches in a row of which none moved an end of a range by more
            than 1 % of the range; None for all batches.

    Raises:
        CalibrationError: As for :func:`calibrate`.
    """
    example = model_inputs(example_inputs)
    specs = input_specs(prepared)
    run = _runner(prepared, observe_layers=observe_layers)
    count = samples = quiet = 0
    before: list[torch.Tensor] = []
    with torch.no_grad():
        for batch in batches:
            call = _checked_call(batch, count, specs, example, input_names)
            run(call)
            count += 1
            samples += _sample_count(call)
            if patience is not None:
                ranges = _observed_ranges(prepared)
                quiet = 0 if _have_moved(before, ranges) else quiet + 1
                # Compared with where they were last heard of: many small steps are a move.
                before = before if quiet else ranges
                if quiet >= patience:
                    break
    if not count:
        raise empty_calibration_error()
    return CalibrationData(count, samples)


def check_patience(patience: int | None) -> None:
    """Check a number of batches to wait for.

    Raises:
        CalibrationError: It is less than 1.
    """
    if patience is not None and patience < 1:
        raise CalibrationError(
            f"patience is the number of batches to wait for a range to move, 1 or more, "
            f"got {patience}"
        )


def _sample_count(call: ModelInputs) -> int:
    tensors = (leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
    first = next(tensors, None)
    return 1 if first is None else len(first)


def _observed_ranges(prepared: torch.fx.GraphModule) -> list[torch.Tensor]:
    """The smallest and the largest value of each observer that has one range."""
    ends = [
        (getattr(module, "min_val", None), getattr(module, "max_val", None))
        for module in prepared.modules()
    ]
    return [
        torch.stack([low.reshape(()), high.reshape(())])
        for low, high in ends
        if isinstance(low, torch.Tensor) and isinstance(high, torch.Tensor)
        if low.numel() == high.numel() == 1
    ]


def _have_moved(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    if len(before) != len(after):  # nothing was seen before the first batch
        return True
    return any(
        bool((new - old).abs().max() > _SETTLED * (new[1] - new[0]))
        for old, new in zip(before, after, strict=True)
    )


def checked_calls(
    exported: torch.fx.GraphModule,
    batches: Iterable[Any],
    example_inputs: Any,
    input_names: Sequence[str] = (),
) -> list[ModelInputs]:
    """Bring batches into the form of the example inputs.

    Args:
        exported: The model that they are for.
        batches: As for :func:`calibrate`.
        example_inputs: As for :func:`calibrate`.
        input_names: As for :func:`calibrate`.

    Raises:
        CalibrationError: A batch does not fit the exported model or has NaN or infinity in it.
    """
    example, specs = model_inputs(example_inputs), input_specs(exported)
    return [
        _checked_call(batch, index, specs, example, input_names)
        for index, batch in enumerate(batches)
    ]


class LayerObserver(Protocol):
    """A weight observer that also wants to see what its layer computes with.

    A quantizer of a backend may insert observers with this method; they are called by
    :func:`calibrate` for every batch, before the layer runs.
    """

    def observe_layer(
        self, layer: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Look at one call of the layer.

        Args:
            layer: The operator whose second argument is the observed weight.
            args: Its positional arguments, with the values of this batch; not to be written to.
            kwargs: Its keyword arguments, likewise.
        """


class _LayerShowing(torch.fx.Interpreter):
    """Runs a prepared module, and shows each layer's arguments to the observer of its weight."""

    def __init__(
        self, module: torch.fx.GraphModule, observers: Mapping[torch.fx.Node, LayerObserver]
    ) -> None:
        super().__init__(module)
        self._observers = observers

    def run_node(self, n: torch.fx.Node) -> Any:
        if n in self._observers:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self._observers[n].observe_layer(n.target, args, kwargs)  # type: ignore[arg-type]
        return super().run_node(n)


def _runner(
    prepared: torch.fx.GraphModule, *, observe_layers: bool
) -> Callable[[ModelInputs], object]:
    observers = _layer_observers(prepared) if observe_layers else {}
    if not observers:
        return lambda call: prepared(*call.args, **call.kwargs)
    interpreter = _LayerShowing(prepared, observers)
    # An interpreter takes flat inputs only.
    return lambda call: interpreter.run(*call.leaves, enable_io_processing=False)


def _layer_observers(prepared: torch.fx.GraphModule) -> dict[torch.fx.Node, LayerObserver]:
    found = {}
    for node in prepared.graph.nodes:
        weight = node.args[1] if node.op == "call_function" and len(node.args) > 1 else None
        if isinstance(weight, torch.fx.Node) and weight.op == "call_module":
            observer: Any = prepared.get_submodule(str(weight.target))
            if hasattr(observer, "observe_layer"):
                found[node] = observer
    return found


def first_batch_checked(calibration: Iterable[Any]) -> Iterable[Any]:
    """Make sure that there is a first batch, without losing it.

    Args:
        calibration: Any iterable, also one that can be read only once.

    Returns:
        An iterable with the same batches.

    Raises:
        CalibrationError: There is none.
    """
    if isinstance(calibration, (torch.Tensor, Mapping)):
        raise CalibrationError(
            f"calibration must be an iterable of batches, got one {type(calibration).__name__}: "
            f"pass [{'batch' if isinstance(calibration, Mapping) else 'tensor'}]"
        )
    iterator = iter(calibration)
    first = list(itertools.islice(iterator, 1))
    if not first:
        raise empty_calibration_error()
    return itertools.chain(first, iterator)


def empty_calibration_error() -> CalibrationError:
    """Return the error for static quantization without data."""
    return CalibrationError(
        "calibration has no batches, and static quantization takes the ranges of the activations "
        "from them: pass calibration=[batch, ...] with representative inputs (a DataLoader is "
        "fine; a generator that has been read is empty), or use a dynamic backend"
    )


def positional_names(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the inputs that ``model.forward`` takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def _checked_call(
    batch: Any,
    batch_index: int,
    specs: Sequence[InputSpec],
    example: ModelInputs,
    names: Sequence[str],
) -> ModelInputs:
    try:
        return checked_call(batch, specs, example, names)
    except BatchError as error:
        raise CalibrationError(
            f"calibration batch {batch_index}{error}",
            batch_index=batch_index,
            input_name=error.input_name,
        ) from None
