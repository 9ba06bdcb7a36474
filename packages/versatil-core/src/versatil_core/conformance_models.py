"""The small models that a backend is tried on: between them, every kind of layer it may meet."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional

from versatil_core.backend import BasePT2EBackend
from versatil_core.quantize import quantize


# Each model has a linear and a two-dimensional convolution, for backends that have kernels for one of them only.
class Linears(nn.Module):
    """With and without bias, activation functions, a residual, views, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(6, 6, 1)
        self.hidden = nn.Linear(16, 32)
        self.plain = nn.Linear(32, 16, bias=False)
        self.added = nn.Linear(16, 16)
        self.heads = nn.Linear(16, 16)
        self.shared = nn.Linear(16, 16)
        self.shared_too = nn.Linear(16, 16)
        self.shared_too.weight = self.shared.weight
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, 6, 4]`` for ``[batch, 6, 16]``."""
        x = self.mix(x.unflatten(2, (4, 4))).flatten(2)
        x = functional.gelu(self.plain(self.hidden(x).relu()))
        x = x + self.added(x)
        x = self.heads(x).unflatten(2, (4, 4)).transpose(1, 2)
        x = self.shared(x.transpose(1, 2).flatten(2))
        return self.head(self.shared_too(x).relu())


class Convolutions(nn.Module):
    """Of one and two dimensions: stride, padding, dilation, groups, depthwise, 1x1, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.pointwise = nn.Conv2d(8, 12, 1)
        self.row = nn.Conv1d(12, 12, 3, padding=1)
        self.wide_row = nn.Conv1d(12, 6, 5, stride=2, bias=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, 4]`` for ``[batch, 3, 16, 16]``."""
        x = self.strided(x).relu()
        x = (self.dilated(x) + x).relu()
        x = self.pointwise(self.depthwise(self.grouped(x)).relu())
        return self.head(self.wide_row(self.row(x.flatten(2)).relu()).mean(2))


class Volumes(nn.Module):
    """Convolutions of three dimensions: stride, padding, groups, 1x1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, 8, 3, stride=(1, 2, 2), padding=1)
        self.grouped = nn.Conv3d(8, 8, (1, 3, 3), groups=2, bias=False)
        self.pointwise = nn.Conv3d(8, 6, 1)
        self.plane = nn.Conv2d(6, 6, 3)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, 4]`` for ``[batch, 2, 4, 12, 12]``."""
        x = self.pointwise(self.grouped(self.stem(x).relu()).relu()).relu()
        return self.head(self.plane(x.mean(2)).mean((2, 3)))


class Products(nn.Module):
    """Linear layers written by hand, and attention, which cuts its packed weight where keys differ from queries."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(6, 6, 1)
        self.weights = nn.ParameterList([torch.randn(16, 16) / 4 for _ in range(5)])
        self.bias = nn.Parameter(torch.randn(16))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, 6, 4]`` for ``[batch, 6, 16]``."""
        first, second, third, fourth, fifth = self.weights
        x = self.mix(x.unflatten(2, (4, 4))).flatten(2)
        x = functional.linear(x, first, self.bias).relu() @ second
        x = torch.tanh(x @ third.t() + self.bias)
        x = torch.einsum("bsi,io->bso", x, fourth)
        x = torch.addmm(self.bias, x.flatten(0, 1), fifth).unflatten(0, (-1, 6))
        x, _ = self.attention(x, x[:, :3], x[:, :3])
        return self.head(self.normed(self.layer(x)))


class AnyBatch(nn.Module):
    """A convolution and two linears, for batches of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, 4]`` for ``[batch, 3, 8, 8]``."""
        return self.head(self.hidden(self.conv(x).relu().mean((2, 3))).relu())


class LargestSums(nn.Module):
    """All weights alike, and inputs at both ends of their range: sums grow as large as they can."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 3)
        self.head = nn.Linear(32, 32)
        nn.init.ones_(self.conv.weight)
        nn.init.ones_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, 32]`` for ``[batch, 16, 6, 6]``."""
        x = self.conv(x.clamp(-1, 1)).mean((2, 3))
        return self.head(x.clamp(-1, 1))


class Siblings(nn.Module):
    """Modules whose paths begin alike: ``layer1`` and ``layer10``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Linear(8, 8))
        self.layer10 = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, 3, 8, 8]`` for the same."""
        return self.layer10(self.layer1(x))


@dataclass(frozen=True)
class ModelCase:
    """A model with its inputs.

    Attributes:
        name: What it is called in the name of a test.
        make: Returns the float model.
        input_shape: Shape of its example.
        other_batch: A batch size other than the example's that it must take, or None.
    """

    name: str
    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    other_batch: int | None = None

    def model(self) -> nn.Module:
        """Return the float model, the same each time, and leave torch's random numbers alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().eval()

    def example(self) -> torch.Tensor:
        """Return the example, the same each time."""
        return _normal(self.input_shape)

    def unseen(self) -> torch.Tensor:
        """Return other data, beyond the range of the example, of another batch size if that may be."""
        batch, *rest = self.input_shape
        return 3 * _normal((self.other_batch or batch, *rest))

    def quantize(self, backend: BasePT2EBackend, *, strict: bool = False) -> GraphModule:
        """Return the reference of the model."""
        x = self.example()
        shapes = None if self.other_batch is None else ({0: torch.export.Dim("n", min=1, max=64)},)
        calibration = None if backend.is_dynamic else [x]
        return quantize(self.model(), x, backend, calibration, dynamic_shapes=shapes, strict=strict)


LINEARS = ModelCase("linears", Linears, (4, 6, 16))
CONVOLUTIONS = ModelCase("convolutions", Convolutions, (2, 3, 16, 16))
ANY_BATCH = ModelCase("any batch", AnyBatch, (2, 3, 8, 8), other_batch=5)
SIBLINGS = ModelCase("siblings", Siblings, (2, 3, 8, 8))
PRODUCTS = ModelCase("products", Products, (4, 6, 16))
CASES = (
    LINEARS,
    CONVOLUTIONS,
    ANY_BATCH,
    PRODUCTS,
    ModelCase("volumes", Volumes, (2, 2, 4, 12, 12)),
    # Not smaller: for a few rows a CPU may take a kernel of another kind.
    ModelCase("largest sums", LargestSums, (32, 16, 6, 6)),
)


@functools.lru_cache(maxsize=64)
def cached_reference(
    backend_class: type[BasePT2EBackend], options: str, case: ModelCase
) -> GraphModule:
    """Return a reference that several tests look at, and none changes.

    Args:
        backend_class: The backend.
        options: Its options as JSON.
        case: The model.
    """
    return case.quantize(backend_class(**json.loads(options)))


def layer_paths(model: nn.Module) -> dict[str, Any]:
    """Return path -> layer of each linear and convolution, those with shared weights included."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    modules = model.named_modules(remove_duplicate=False)
    # Attention computes its last product itself, without calling the layer that holds the weight.
    kept = {"out_proj"}
    return {
        path: module
        for path, module in modules
        if isinstance(module, kinds) and path.rpartition(".")[2] not in kept
    }


def _normal(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
