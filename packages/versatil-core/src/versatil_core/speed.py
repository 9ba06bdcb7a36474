"""Measures the float model, eager and compiled, and the quantized one, taking turns."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from versatil_core._torch_compat import patch_inductor_config, unflatten_for_call
from versatil_core.backend import BasePT2EBackend
from versatil_core.compile import own_code
from versatil_core.errors import InputError
from versatil_core.export import ModelInputs, input_specs
from versatil_core.input_check import input_faults
from versatil_core.latency import (
    LatencyComparison,
    judge,
    measure_interleaved,
    median_interval,
    timed,
)
from versatil_core.recorded_values import own_inputs
from versatil_core.reference_info import DynamicSize, InputSpec
from versatil_core.report_result import SpeedPoint

FLOAT_EAGER, FLOAT_COMPILED, INT8 = "float eager", "float compiled", "int8"


def compile_float(
    model: Callable[..., Any], backend: BasePT2EBackend, call: ModelInputs
) -> Callable[..., Any]:
    """Compile a float model the best way: frozen, with the Inductor settings int8 gets.

    Call it and its result under ``torch.no_grad()``; Inductor freezes nothing otherwise.

    Args:
        model: A float model in eval mode.
        backend: Whose settings to take.
        call: Inputs of the sizes that it is compiled for.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Code of its own: Dynamo counts recompilations by code object.
    compiled: Callable[..., Any] = torch.compile(own_code(run), dynamic=False)
    with patch_inductor_config(backend.inductor_settings.config_values()):
        compiled(*call.args, **call.kwargs)  # the first call compiles
    return compiled


def measure_speed(
    float_model: Callable[..., Any],
    int8_model: Callable[..., Any],
    backend: BasePT2EBackend,
    call: ModelInputs,
    *,
    threads: int,
    batch: int,
    rounds: int,
    on_step: Callable[[], None] | None = None,
) -> SpeedPoint:
    """Let the three take turns in one configuration.

    Args:
        float_model: In eval mode.
        int8_model: What was made of it, compiled for so many threads.
        backend: Whose settings the float model is compiled with.
        call: Inputs of both.
        threads: Threads that torch may use.
        batch: Samples in the inputs, to be shown.
        rounds: Samples of each.
        on_step: Called after the compilation of the float model and after each round.

    Returns:
        The medians, and the ratios with what they say.
    """
    step = on_step or (lambda: None)
    with torch.no_grad(), torch_threads(threads):
        float_compiled = compile_float(float_model, backend, own_inputs(call))
        step()
        latency = measure_interleaved(
            {
                FLOAT_EAGER: timed(_calling(float_model, call)),
                FLOAT_COMPILED: timed(_calling(float_compiled, call)),
                INT8: timed(_calling(int8_model, call)),
            },
            rounds=rounds,
            on_round=step,
        )
    shapes = [tuple(leaf.shape) for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    return speed_point(latency, threads, batch, shapes)


def _calling(model: Callable[..., Any], call: ModelInputs) -> Callable[[], Any]:
    own = own_inputs(call)
    return lambda: model(*own.args, **own.kwargs)


def speed_point(
    latency: LatencyComparison,
    threads: int,
    batch: int,
    input_shapes: Sequence[tuple[int, ...]],
) -> SpeedPoint:
    """Sum up one interleaved run of the three."""
    ratios = latency.ratios(FLOAT_COMPILED, INT8)
    return SpeedPoint(
        threads=threads,
        batch=batch,
        input_shapes=tuple(input_shapes),
        rounds=len(ratios),
        float_eager=latency.by_name[FLOAT_EAGER].timing,
        float_compiled=latency.by_name[FLOAT_COMPILED].timing,
        int8=latency.by_name[INT8].timing,
        speedup=latency.ratio_timing(FLOAT_COMPILED, INT8),
        speedup_eager=latency.ratio_timing(FLOAT_EAGER, INT8),
        speedup_interval=median_interval(ratios),
        judgement=judge(ratios),
    )


def with_batch(reference: GraphModule, call: ModelInputs, size: int) -> ModelInputs:
    """Give inputs another batch size, by repeating and cutting samples.

    Args:
        reference: Says which sizes may vary; of each input whose first size does, that one is the batch.
        call: Inputs that fit it.
        size: Samples of the result.

    Raises:
        InputError: The reference does not take this size.
    """
    specs, leaves = input_specs(reference), call.leaves
    if size == sample_count(reference, call):
        return call
    symbol = _batch_symbol(specs)
    if symbol is None:
        raise InputError(
            f"batch size {size}: the model was quantized for {sample_count(reference, call)} samples at a time; "
            f"quantize it with dynamic_shapes to run it with others"
        )
    leaves = [_resized(leaf, spec, symbol, size) for leaf, spec in zip(leaves, specs, strict=True)]
    for fault in input_faults(specs, leaves):
        raise InputError(f"batch size {size}: {fault}", input_name=fault.input_name)
    return ModelInputs(*unflatten_for_call(reference, leaves))


def sample_count(reference: GraphModule, call: ModelInputs) -> int:
    """How many samples inputs have: the first size of an input where it may vary, else that of the first input."""
    specs, leaves = input_specs(reference), call.leaves
    symbol = _batch_symbol(specs)
    for spec, leaf in zip(specs, leaves, strict=True):
        if spec.shape and (symbol is None or _symbol_of(spec.shape[0]) == symbol):
            return int(leaf.shape[0])
    return 1


def _batch_symbol(specs: Sequence[InputSpec]) -> str | None:
    symbols = (_symbol_of(spec.shape[0]) for spec in specs if spec.shape)
    return next((symbol for symbol in symbols if symbol is not None), None)


def _symbol_of(size: int | DynamicSize) -> str | None:
    return size.symbol if isinstance(size, DynamicSize) else None


def _resized(leaf: Any, spec: InputSpec, symbol: str, size: int) -> Any:
    for dim, expected in enumerate(spec.shape or ()):
        if isinstance(expected, DynamicSize) and expected.symbol == symbol:
            there = leaf.shape[dim]
            leaf = torch.cat([leaf] * -(-size // there), dim).narrow(dim, 0, size)
    return leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
