"""What the quantizer annotates; torchao's own quantizer is the measure where it works."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.nn import functional
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from versatil_core import QuantizationTarget, load_quantizer_module, quantize, sqnr_db
from versatil_x86 import X86InductorBackend


def reference_of(model: torch.nn.Module, *x: torch.Tensor, **options: Any) -> GraphModule:
    strict = options.pop("strict", False)
    torch.manual_seed(0)
    backend = X86InductorBackend(reduce_range=True, **options)
    return quantize(model.eval(), x, backend, [x], strict=strict)


def targets(module: GraphModule) -> Counter[str]:
    return Counter(str(n.target) for n in module.graph.nodes if n.op == "call_function")


def int8_layers(module: GraphModule) -> int:
    counted = targets(module)
    return sum(counted[f"aten.{op}.default"] for op in ("linear", "conv1d", "conv2d")) - len(
        float_layers(module)
    )


def float_layers(module: GraphModule) -> list[str]:
    layers = {torch.ops.aten.linear.default, torch.ops.aten.conv1d.default}
    layers |= {torch.ops.aten.conv2d.default}
    return [
        node.name
        for node in module.graph.nodes
        if node.target in layers
        and not all("dequantize" in str(arg.target) for arg in node.args[:2])
    ]


class Linear(torch.nn.Module):
    """A linear layer, and something done around it."""

    def __init__(self, body: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self.layer, x)


class Conv(Linear):
    def __init__(self, body: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(body)
        self.layer = torch.nn.Conv2d(8, 8, 3, padding=1)  # type: ignore[assignment]


BODIES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "called twice": lambda layer, x: layer(torch.relu(layer(x))),
    "called twice, activation module": lambda layer, x: functional.relu(layer(layer(x))),
    "plus a number": lambda layer, x: layer(x) + 1.0,
    "number plus": lambda layer, x: 1.0 + layer(x),
    "plus itself": lambda layer, x: sum([layer(x)] * 2),
    "plus input": lambda layer, x: layer(x) + x,
    "input plus": lambda layer, x: torch.relu(x + layer(x)),
    "in place": lambda layer, x: layer(x).add_(x).relu_(),
    "broadcast": lambda layer, x: layer(x) + x.mean(-1, keepdim=True),
    "scaled": lambda layer, x: torch.add(layer(x), x, alpha=2),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("body", sorted(BODIES))
@pytest.mark.parametrize("kind", [Linear, Conv])
def test_every_call_of_a_layer_is_quantized(
    kind: type[Linear], body: str, *, is_dynamic: bool, strict: bool
) -> None:
    """The quantizer of torchao fails on several of these."""
    model = kind(BODIES[body])
    x = torch.randn(2, 8, 6, 6) if kind is Conv else torch.randn(2, 8)

    reference = reference_of(model, x, is_dynamic=is_dynamic, strict=strict)

    assert float_layers(reference) == []
    assert int8_layers(reference) == (2 if "twice" in body else 1)
    want = model(x).detach()
    assert 20 * torch.log10(want.norm() / (reference(x) - want).norm()) > 20


def test_functional_and_one_dimensional_convolutions() -> None:
    class Functional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4, 3))
            self.conv = torch.nn.Conv1d(4, 4, 3, padding="same")

        def forward(self, x: torch.Tensor) -> Any:
            return self.conv(functional.conv1d(x, self.weight))

    reference = reference_of(Functional(), torch.randn(2, 4, 9))

    assert targets(reference)["quantized_decomposed.dequantize_per_channel.default"] == 2


def test_weights_that_are_computed_are_left_alone() -> None:
    class Computed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
            return functional.linear(self.layer(x), w)

    reference = reference_of(Computed(), torch.randn(2, 4), torch.randn(4, 4))

    assert targets(reference)["quantized_decomposed.dequantize_per_channel.default"] == 1


@pytest.mark.parametrize("reduce_range", [False, True])
def test_reduced_range_is_in_every_activation(*, reduce_range: bool) -> None:
    x = torch.randn(2, 8)

    reference = quantize(
        torch.nn.Linear(8, 8), x, X86InductorBackend(reduce_range=reduce_range), [x]
    )

    [quantizer] = [n for n in reference.graph.nodes if "quantize_per_tensor" in n.name][:1]
    assert quantizer.args[3:] == (0, 127 if reduce_range else 255, torch.uint8)


def test_dynamic_quantization_touches_layers_only() -> None:
    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.conv(x)
            return functional.max_pool2d(y * y + y, 2)

    reference = reference_of(Pooled(), torch.randn(1, 3, 8, 8), is_dynamic=True)

    assert targets(reference)["quantized_decomposed.choose_qparams.tensor"] == 1


class Residual(torch.nn.Module):
    """What a ResNet is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.pool = torch.nn.MaxPool2d(2)
        self.first = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.second = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.shortcut = torch.nn.Conv2d(8, 8, 1)
        self.third = torch.nn.Conv2d(8, 8, 1)
        self.average = torch.nn.AdaptiveAvgPool2d(1)
        self.head = torch.nn.Linear(8, 4)
        self.relu1, self.relu2, self.relu3, self.relu4 = (torch.nn.ReLU() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.pool(self.relu1(self.norm(self.stem(x))))
        y = self.second(self.relu2(self.first(x)))
        x = self.relu3(y + self.shortcut(x))
        x = self.relu4(self.third(x) + x)
        return self.head(torch.flatten(self.average(torch.cat([x, x], 1)[:, :8]), 1))


class Dense(torch.nn.Module):
    """Pools and concatenations of quantized outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.b = torch.nn.Conv2d(3, 4, 1)
        self.c = torch.nn.Conv2d(8, 4, 1)
        self.head = torch.nn.Linear(64, 3)
        self.relu, self.clip, self.silu = torch.nn.ReLU(), torch.nn.Hardtanh(), torch.nn.SiLU()
        self.pool = torch.nn.AvgPool2d(2)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.cat([self.relu(self.a(x)), self.clip(self.b(x))], 1)
        y = self.pool(self.silu(self.c(y)))
        return self.head(torch.flatten(y, 1))


class Block(torch.nn.Module):
    """What a transformer is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        q, k, v = (p(y).view(2, 5, 2, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        attention = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attention.transpose(1, 2).reshape(2, 5, 8))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize(
    ("kind", "shape"), [(Residual, (1, 3, 8, 8)), (Dense, (1, 3, 8, 8)), (Block, (2, 5, 8))]
)
def test_same_graph_as_torchao(kind: type[torch.nn.Module], shape: tuple[int, ...]) -> None:
    """For torchao: strict export, and activations that are modules; it misses others."""
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(shape)
    torchao = load_quantizer_module("x86_inductor_quantizer")
    quantizer = torchao.X86InductorQuantizer()
    quantizer.set_global(torchao.get_default_x86_inductor_quantization_config(reduce_range=True))
    with torch.no_grad():
        exported = torch.export.export(model, (x,), strict=True).module()
        prepared = prepare_pt2e(exported, quantizer)
        prepared(x)
        want = convert_pt2e(prepared)

    got = reference_of(model, x)

    ours, theirs = targets(got), targets(want)
    pairs = [
        ops.pop(f"quantized_decomposed.{op}quantize_per_tensor.default")
        for ops in (ours, theirs)
        for op in ("", "de")
    ]
    assert ours == theirs, kind
    if kind is Block:
        assert pairs[:2] == pairs[2:]
        assert torch.equal(got(x), want(x))
    else:  # ours has none behind a layer where a pass puts it, or where nothing int8 reads it
        assert (pairs[0] < pairs[2], pairs[1] < pairs[3]) == (True, True)
        assert sqnr_db(got(x), model(x)) > sqnr_db(want(x), model(x)) - 1


@pytest.mark.parametrize(
    ("kind", "shape"), [(Residual, (1, 3, 8, 8)), (Dense, (1, 3, 8, 8)), (Block, (2, 5, 8))]
)
def test_safe_weights_change_nothing_but_weights(
    kind: type[torch.nn.Module], shape: tuple[int, ...]
) -> None:
    """The same graph, with activations of 8 bits."""
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(shape)

    safe, full = (
        quantize(model, x, X86InductorBackend(saturation=saturation), [x])
        for saturation in ("safe", "ignore")
    )

    assert targets(safe) == targets(full)
    assert not torch.equal(safe(x), full(x))


@pytest.mark.parametrize("strict", [False, True])
def test_only_the_target(*, strict: bool) -> None:
    """Case 06: the layer's activation may lie outside the target."""
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.nn.ReLU(), torch.nn.Linear(8, 8)
    )
    x = torch.randn(2, 8)
    target = QuantizationTarget("0", X86InductorBackend(reduce_range=True))

    reference = quantize(model, x, target, [x], strict=strict)

    assert targets(reference)["quantized_decomposed.dequantize_per_channel.default"] == 1
    assert len(float_layers(reference)) == 1


def test_what_follows_an_excluded_layer_stays_float() -> None:
    """Pooling is int8 behind an int8 layer only; otherwise it would be quantized for nothing."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.AvgPool2d(2), torch.nn.Conv2d(4, 4, 3)
    )
    x = torch.randn(1, 2, 10, 10)
    backend = X86InductorBackend(saturation="ignore")

    def quantizes(*exclude: str) -> int:
        target = QuantizationTarget("", backend, exclude=exclude)
        reference = quantize(model, x, target, [x])
        return sum("quantize_per_tensor" in str(node.target) for node in reference.graph.nodes)

    assert (quantizes(), quantizes("0")) == (6, 2)
