"""Checks inputs against what a model was exported with."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from versatil_core.reference_info import DynamicSize, InputSpec


@dataclass(frozen=True)
class InputFault:
    """One input that does not fit; as text: which one, what is wrong, what to do.

    Attributes:
        index: Its position among the flattened inputs.
        input_name: Its name in the exported graph.
        text: What was expected, what came, and what to do.
    """

    index: int
    input_name: str
    text: str

    def __str__(self) -> str:
        """One line for a message."""
        return f"input {self.index} ({self.input_name}): {self.text}"


def input_faults(
    specs: Sequence[InputSpec], leaves: Sequence[Any], *, check_finite: bool = False
) -> Iterator[InputFault]:
    """Yield what does not fit, the first input first.

    Args:
        specs: What the model takes.
        leaves: Tensors and constants, in the same order.
        check_finite: Whether NaN and infinity are faults too; reads every value.
    """
    symbols: dict[str, int] = {}
    for index, (spec, leaf) in enumerate(zip(specs, leaves, strict=True)):
        for text in _faults(spec, leaf, symbols, check_finite=check_finite):
            yield InputFault(index, spec.name, text)


def _faults(
    spec: InputSpec, leaf: Any, symbols: dict[str, int], *, check_finite: bool
) -> Iterator[str]:
    """Yield what is wrong with one input, the most basic fault first."""
    if spec.shape is None:
        is_tensor = isinstance(leaf, torch.Tensor)  # comparing one would compare its elements
        if is_tensor or leaf != spec.value:
            got = f"a tensor of shape {tuple(leaf.shape)}" if is_tensor else repr(leaf)
            yield (
                f"expected the constant {spec.value!r} that the model was exported with, got {got}"
            )
        return
    if not isinstance(leaf, torch.Tensor):
        yield f"expected a tensor, got {type(leaf).__name__}: convert it, as with torch.as_tensor()"
        return
    if leaf.device.type != "cpu":
        yield f"expected a tensor on the CPU, got one on {str(leaf.device)!r}: call .cpu() on it"
    if str(leaf.dtype) != spec.dtype:
        yield f"expected {spec.dtype}, got {leaf.dtype}: convert it with .to({spec.dtype})"
    if fault := _shape_fault(spec.shape, leaf.shape, symbols):
        yield fault
    if check_finite and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
        bad = int((~torch.isfinite(leaf)).sum())
        yield (
            f"{bad} of {leaf.numel()} values are NaN or infinite, which would spoil the measured "
            f"ranges: clean the data or leave this batch out"
        )


def _shape_fault(
    expected: Sequence[int | DynamicSize], got: Sequence[int], symbols: dict[str, int]
) -> str | None:
    wanted = f"expected the shape {_shape_text(expected)}, got {tuple(got)}"
    if len(expected) != len(got):
        return f"{wanted}: it needs {len(expected)} dimensions"
    for dim, (size, given) in enumerate(zip(expected, got, strict=True)):
        if isinstance(size, int):
            if size != given:
                return (
                    f"{wanted}: use size {size} in dimension {dim} (a last, smaller batch: "
                    f"drop_last=True), or make it dynamic with quantize(..., dynamic_shapes=...)"
                )
            continue
        maximum = math.inf if size.maximum is None else size.maximum
        if not size.minimum <= given <= maximum:
            return f"{wanted}: dimension {dim} must be in {size.minimum} … {maximum}"
        if symbols.setdefault(size.symbol, given) != given:
            return (
                f"{wanted}: the sizes called {size.symbol} must be equal, "
                f"but there are {symbols[size.symbol]} and {given}"
            )
    return None


def _shape_text(shape: Sequence[int | DynamicSize]) -> str:
    sizes = [str(size) if isinstance(size, int) else size.symbol for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
