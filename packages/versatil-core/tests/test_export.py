"""Export captures a copy, widens examples of size 1, and says what is fixed and what is not."""

from typing import Any

import pytest
import torch
from torch.export import Dim

from versatil_core.export import ModelInputs, export, input_specs, model_inputs
from versatil_core.reference_info import DynamicSize


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, more: dict[str, list[torch.Tensor]], scale: int = 2) -> Any:
        return self.linear(x) * scale + more["y"][0]


@pytest.mark.parametrize(
    ("inputs", "want"),
    [
        (1, ModelInputs((1,), {})),
        ((1, 2), ModelInputs((1, 2), {})),
        ([1], ModelInputs((1,), {})),
        ({"x": 1}, ModelInputs((), {"x": 1})),
    ],
)
def test_forms_of_inputs(inputs: Any, want: ModelInputs) -> None:
    assert model_inputs(inputs) == want


def test_the_export_shares_nothing_with_the_model() -> None:
    model = torch.nn.Linear(4, 2)

    exported = export(model, torch.randn(3, 4))

    assert not {p.data_ptr() for p in exported.parameters()} & {
        p.data_ptr() for p in model.parameters()
    }


def test_specs_of_nested_inputs() -> None:
    exported = export(Nested(), (torch.randn(3, 4), {"y": [torch.randn(3, 1)]}, 5))

    x, y, scale = input_specs(exported)

    assert (x.name, x.shape, x.dtype) == ("x", (3, 4), "torch.float32")
    assert y.shape == (3, 1)
    assert (scale.shape, scale.dtype, scale.value) == (None, None, 5)


BATCH = Dim("batch", max=32)


@pytest.mark.parametrize(
    "dynamic_shapes",
    [
        ({0: BATCH}, {"y": [{0: BATCH}]}, None),
        ({0: Dim.AUTO, 1: None}, {"y": [(Dim.AUTO, None)]}, None),
        {"x": {0: BATCH}, "more": {"y": [{0: BATCH}]}, "scale": None},
        ({0: Dim.AUTO, 1: Dim.STATIC}, {"y": [{0: Dim.AUTO, 1: Dim.STATIC}]}, None),
    ],
    ids=["named", "auto", "by name", "static"],
)
@pytest.mark.parametrize("strict", [False, True])
def test_an_example_of_batch_size_1_stays_dynamic(dynamic_shapes: Any, *, strict: bool) -> None:
    """Case 15."""
    inputs = (torch.randn(1, 4), {"y": [torch.randn(1, 1)]}, 5)

    exported = export(Nested(), inputs, dynamic_shapes=dynamic_shapes, strict=strict)

    x, y, _ = input_specs(exported)
    assert x.shape is not None
    assert y.shape is not None
    assert isinstance(x.shape[0], DynamicSize)
    assert x.shape[0] == y.shape[0]
    assert x.shape[0].minimum == 1
    assert (x.shape[1], y.shape[1]) == (4, 1)
    for size in (1, 7):
        out = exported(torch.randn(size, 4), {"y": [torch.randn(size, 1)]}, 5)
        assert out.shape == (size, 4)


def test_an_example_of_size_1_by_name_stays_dynamic() -> None:
    inputs = {"x": torch.randn(1, 4), "more": {"y": [torch.randn(1, 1)]}}
    shapes = ({0: BATCH}, {"y": [{0: BATCH}]})

    exported = export(Nested(), inputs, dynamic_shapes=shapes)

    assert exported(x=torch.randn(5, 4), more={"y": [torch.randn(5, 1)]}).shape == (5, 4)
