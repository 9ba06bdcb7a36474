"""Names, derived sizes and the size on disk of saved references."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

from versatil_core import ModelFileError, load, quantize, save

Backend = Callable[..., Any]


class Derived(torch.nn.Module):
    """One input is twice as long as the other, and names are what users make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({"a b [0]": torch.nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor, y: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layers["a b [0]"](x) + y["x=(1)"][::2][: x.shape[0]]


def test_derived_sizes_and_odd_names(linear_backend: Backend, tmp_path: Path) -> None:
    n = Dim("n", min=2, max=50)
    x, y = torch.randn(4, 4), {"x=(1)": torch.randn(8, 4)}
    shapes = ({0: n}, {"x=(1)": {0: 2 * n}})
    reference = quantize(Derived(), (x, y), linear_backend(), [(x, y)], dynamic_shapes=shapes)

    save(reference, tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")

    x, y = torch.randn(7, 4), {"x=(1)": torch.randn(14, 4)}
    assert torch.equal(loaded(x, y), reference(x, y))
    assert "layers.a b [0].weight" in loaded.state_dict()


class Named(torch.nn.Module):
    """One layer of a given name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@pytest.mark.parametrize("name", ["it's", "a,b", "a;b"])
def test_a_name_that_could_not_be_read_is_refused_at_once(
    linear_backend: Backend, tmp_path: Path, name: str
) -> None:
    """Quotes would end up in code, and torch itself stumbles over commas."""
    x = torch.randn(2, 4)
    reference = quantize(Named(name), x, linear_backend(), [x])

    with pytest.raises(ModelFileError, match="cannot be written, since"):
        save(reference, tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_less_than_a_third_of_the_float_one(
    linear_backend: Backend, tmp_path: Path
) -> None:
    """No float weight stays whose int8 copy is used; what is left is the graph."""
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model, x = torch.nn.Sequential(*layers), torch.randn(2, 256)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "float.pt2")

    save(quantize(model, x, linear_backend(), [x]), tmp_path / "int8.pt2")

    int8, floats = ((tmp_path / name).stat().st_size for name in ("int8.pt2", "float.pt2"))
    assert int8 <= 0.30 * floats
