"""Each way in which an input may not fit is said in words that name it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from versatil_core import InputError, compile, quantize  # noqa: A004 -- the verb
from versatil_core.input_check import input_faults
from versatil_core.reference_info import DynamicSize, InputSpec

BATCH = DynamicSize("s0", minimum=1, maximum=8, example=2)
IMAGE = InputSpec("image", (BATCH, 3, 4), "torch.float32")
MASK = InputSpec("mask", (BATCH, 4), "torch.bool")
FLAG = InputSpec("is_fast", shape=None, dtype=None, value=True)


def faults(specs: list[InputSpec], *leaves: Any, check_finite: bool = False) -> list[str]:
    return [str(fault) for fault in input_faults(specs, leaves, check_finite=check_finite)]


def good() -> list[Any]:
    return [torch.zeros(5, 3, 4), torch.zeros(5, 4, dtype=torch.bool), True]


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_what_fits_has_no_faults(batch: int) -> None:
    leaves = [torch.zeros(batch, 3, 4), torch.zeros(batch, 4, dtype=torch.bool), True]

    assert faults([IMAGE, MASK, FLAG], *leaves, check_finite=True) == []


@pytest.mark.parametrize(
    ("position", "leaf", "texts"),
    [
        (0, torch.zeros(5, 3), ["expected the shape (s0, 3, 4), got (5, 3)", "3 dimensions"]),
        (0, torch.zeros(5, 2, 4), ["expected the shape (s0, 3, 4), got (5, 2, 4)", "dimension 1"]),
        (0, torch.zeros(9, 3, 4), ["got (9, 3, 4)", "dimension 0 must be in 1 … 8"]),
        (0, torch.zeros(0, 3, 4), ["got (0, 3, 4)", "dimension 0 must be in 1 … 8"]),
        (0, torch.zeros(5, 3, 4).double(), ["expected torch.float32, got torch.float64", ".to("]),
        (0, [1.0], ["expected a tensor, got list", "torch.as_tensor()"]),
        (0, None, ["expected a tensor, got NoneType"]),
        (0, torch.zeros(5, 3, 4, device="meta"), ["on the CPU, got one on 'meta'", ".cpu()"]),
        (1, torch.zeros(5, 4), ["expected torch.bool, got torch.float32"]),
        (1, torch.zeros(6, 4, dtype=torch.bool), ["called s0 must be equal", "5 and 6"]),
        (2, False, ["expected the constant True", "got False"]),
        (2, torch.zeros(2, 3), ["expected the constant True", "got a tensor of shape (2, 3)"]),
    ],
)
def test_a_fault_names_the_input_and_what_came(position: int, leaf: Any, texts: list[str]) -> None:
    leaves = good()
    leaves[position] = leaf

    specs = [IMAGE, MASK, FLAG]
    [fault] = input_faults(specs, leaves)

    assert (fault.index, fault.input_name) == (position, specs[position].name)
    assert str(fault).startswith(f"input {position} ({specs[position].name}): ")
    for text in texts:
        assert text in str(fault)


def test_every_fault_is_yielded_the_first_input_first() -> None:
    leaves = [torch.zeros(5, 2, 4).double(), torch.zeros(7, 9, dtype=torch.bool), False]

    found = [fault.index for fault in input_faults([IMAGE, MASK, FLAG], leaves)]

    assert found == [0, 0, 1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_if_asked_values_are_read(value: float) -> None:
    x = torch.zeros(2, 3, 4)
    x[0, 1, 2] = value

    assert faults([IMAGE], x) == []
    [text] = faults([IMAGE], x, check_finite=True)
    assert "1 of 24 values are NaN or infinite" in text


def test_integers_are_always_finite() -> None:
    spec = InputSpec("tokens", (2,), "torch.int64")

    assert faults([spec], torch.zeros(2, dtype=torch.int64), check_finite=True) == []


def test_a_size_without_a_limit() -> None:
    spec = InputSpec("x", (DynamicSize("s0", 2, None, 4),), "torch.float32")

    assert faults([spec], torch.zeros(10_000)) == []
    [text] = faults([spec], torch.zeros(1))
    assert "expected the shape (s0,), got (1,): dimension 0 must be in 2 … inf" in text


def test_a_wrong_fixed_size_says_how_to_make_it_dynamic() -> None:
    [text] = faults([InputSpec("x", (4, 2), "torch.float32")], torch.zeros(3, 2))

    assert "use size 4 in dimension 0" in text
    assert "dynamic_shapes" in text
    assert "drop_last=True" in text


# What a compiled model says of a call that torch refuses; nothing gets as far as being compiled.


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def inputs(size: int = 4) -> torch.Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def backend(linear_backend: Callable[..., Any]) -> Any:
    """Return a static backend."""
    return linear_backend()


@pytest.fixture
def reference(backend: Any) -> GraphModule:
    """Return a reference for batches of 4."""
    return quantize(model(), inputs(), backend, [inputs()])


@pytest.mark.parametrize(
    ("wrong", "text", "input_name"),
    [
        ((inputs(3),), r"input 0 \((.*)\): expected the shape \(4, 16\), got \(3, 16\)", True),
        ((inputs()[0],), r"expected the shape \(4, 16\), got \(16,\)", True),
        ((inputs().double(),), r"expected torch.float32, got torch.float64", True),
        (([1.0],), r"expected a tensor, got float", True),
        ((), r"the model takes 1 inputs \((.*)\), got 0", False),
        ((inputs(), inputs()), r"the model takes 1 inputs \((.*)\), got 2", False),
    ],
)
def test_wrong_inputs_are_explained(
    reference: GraphModule, backend: Any, wrong: tuple[Any, ...], text: str, *, input_name: bool
) -> None:
    compiled = compile(reference, backend)
    [placeholder] = reference.graph.find_nodes(op="placeholder")

    with pytest.raises(InputError, match=text) as error:
        compiled(*wrong)

    assert error.value.input_name == (placeholder.name if input_name else None)
    assert error.value.__cause__ is not None


def test_a_wrong_input_by_name_is_explained_in_any_order(backend: Any) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * gain

    example = {"x": inputs(), "gain": torch.tensor(2.0)}
    compiled = compile(quantize(Scaled(), example, backend, [example]), backend)

    with pytest.raises(InputError, match=r"input 0 \(x\): .*, got \(3, 16\)") as error:
        compiled(gain=torch.tensor(2.0), x=inputs(3))

    assert error.value.input_name == "x"


def test_a_size_out_of_range_is_explained(backend: Any) -> None:
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    any_batch = quantize(model(), inputs(), backend, [inputs()], dynamic_shapes=(batch,))

    with pytest.raises(InputError, match=r"dimension 0 must be in 1 … 64"):
        compile(any_batch, backend)(inputs(65))


def test_a_numpy_array_is_refused_and_breaks_nothing(linear_backend: Any) -> None:
    x = torch.randn(2, 8)
    backend = linear_backend()
    compiled = compile(quantize(torch.nn.Linear(8, 8), x, backend, calibration=[x]), backend)
    expected = compiled(x)

    with pytest.raises(InputError, match="expected a tensor, got ndarray"):
        compiled(x.numpy())

    assert torch.equal(compiled(x), expected)
