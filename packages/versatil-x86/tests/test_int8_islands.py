"""What lies between int8 layers stays int8: how much of it in well-known architectures, and that it is exact."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from versatil_core import check_exactness, compile, lower, quantize  # noqa: A004 - the verb
from versatil_core.lower import lowered_copy
from versatil_passes import LoweringRules
from versatil_x86 import X86InductorBackend

qd = torch.ops.quantized_decomposed


def conv(inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
    """Convolution, batch norm and relu."""
    norm = nn.BatchNorm2d(outputs)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type] # a tensor
    nn.init.normal_(norm.running_mean, 0.0, 0.1)  # type: ignore[arg-type] # likewise
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=False), norm, nn.ReLU()
    )


class UNet(nn.Module):
    """Skip connections: what a pool reads is concatenated with what was upsampled later."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = conv(3, 8), nn.Sequential(conv(8, 16), conv(16, 16))
        self.up, self.head = conv(24, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        skip = self.down(x)
        y = self.bottom(functional.max_pool2d(skip, 2))
        y = torch.cat([functional.interpolate(y, scale_factor=2.0), skip], 1)
        return self.head(self.up(y))


class ResNet(nn.Module):
    """A pool behind the stem, a residual, an average in front of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = conv(3, 16), conv(16, 16)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        y = functional.max_pool2d(self.stem(x), 3, 2, 1)
        y = (self.second(self.first(y)) + y).relu()
        return self.head(functional.adaptive_avg_pool2d(y, 1).flatten(1))


class Inception(nn.Module):
    """Branches of different depth that are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.c = conv(3, 16), conv(16, 8, 1), conv(16, 8, 1)
        self.b, self.end = nn.Sequential(conv(16, 8, 1), conv(8, 8)), conv(24, 8)

    def forward(self, x: Tensor) -> Any:
        y = functional.max_pool2d(self.stem(x), 2)
        pooled = functional.max_pool2d(y, 3, 1, 1)
        return self.end(torch.cat([self.a(y), self.b(y), self.c(pooled)], 1))


class DenseNet(nn.Module):
    """Each layer reads what all earlier ones gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([conv(3, 8), conv(8, 8), conv(16, 8), conv(24, 8)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        first, *others = self.layers
        parts = [first(x)]
        for layer in others:
            parts.append(layer(torch.cat(parts, 1)))
        return self.head(functional.avg_pool2d(parts[-1], 2).permute(0, 2, 3, 1))


class Classifier(nn.Module):
    """The relu comes behind the pool, as in many tutorials; the head reads a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8 * 9, 5)

    def forward(self, x: Tensor) -> Any:
        x = functional.max_pool2d(self.a(x), 2).relu()
        x = functional.max_pool2d(self.b(x), 2).relu()
        return self.head(x.flatten(1))


# How many quantizes and dequantizes are left, without KeepInt8 and with it. One is that of the input, two more stand
# around an average.
MODELS: dict[type[nn.Module], tuple[int, int]] = {
    UNet: (8, 1),
    ResNet: (7, 3),
    Inception: (9, 1),
    DenseNet: (14, 3),
    Classifier: (5, 1),
}


class WithoutKeepInt8(X86InductorBackend):
    """The same, but that ops between int8 layers run on float."""

    @property
    def lowering_rules(self) -> LoweringRules:
        return replace(super().lowering_rules, without_passes=frozenset({"KeepInt8"}))


def backend(kind: type[X86InductorBackend] = X86InductorBackend) -> X86InductorBackend:
    return kind(saturation="safe")


def reference_of(model: type[nn.Module]) -> tuple[GraphModule, Tensor]:
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 20, 20)
    return quantize(model().eval(), batch, backend(), [batch, 1.5 * batch]), batch


def pair_count(graph: torch.fx.Graph) -> int:
    pair = (qd.quantize_per_tensor.default, qd.dequantize_per_tensor.default)
    return sum(len(graph.find_nodes(op="call_function", target=target)) for target in pair)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_left_of_quantizing_on_the_way(model: type[nn.Module]) -> None:
    reference, _ = reference_of(model)
    rules = [backend(kind).lowering_rules for kind in (WithoutKeepInt8, X86InductorBackend)]
    counts = [pair_count(lowered_copy(reference, each)[0].graph) for each in rules]
    assert tuple(counts) == MODELS[model]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make", [lower, compile])
def test_the_judge(model: type[nn.Module], make: Any) -> None:
    reference, batch = reference_of(model)
    candidate = make(reference, backend())

    # Eagerly, torch's max pool refuses int8 in channels last.
    inputs = [(3 * batch).to(memory_format=torch.channels_last)] if make is lower else []
    for x in (batch, *inputs):
        report = check_exactness(reference, candidate, (x,))
        report.raise_if_inexact()
        assert any(op.op.startswith(("max_pool2d", "cat")) for op in report.ops)


@pytest.mark.parametrize("model", MODELS)
def test_the_pass_changes_no_bit(model: type[nn.Module]) -> None:
    reference, batch = reference_of(model)
    results = [
        lower(reference, backend(kind))(3 * batch) for kind in (WithoutKeepInt8, X86InductorBackend)
    ]
    assert torch.equal(*results)
