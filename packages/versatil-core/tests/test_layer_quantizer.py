"""What is annotated, with whatever recipe a hardware package gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from versatil_core.layer_quantizer import LayerQuantizer, is_layer

aten = torch.ops.aten
ANNOTATION = "quantization_annotation"


def spec(dtype: torch.dtype, *, is_dynamic: bool = False) -> QuantizationSpec:
    return QuantizationSpec(
        dtype=dtype, observer_or_fake_quant_ctr=MinMaxObserver, is_dynamic=is_dynamic
    )


ACTIVATION, WEIGHT = spec(torch.uint8), spec(torch.int8)
CONFIG = QuantizationConfig(ACTIVATION, ACTIVATION, WEIGHT, None, is_qat=False)


def annotated(
    model: nn.Module, *inputs: Tensor, strict: bool = False, **options: Any
) -> list[Node]:
    """Annotate an exported model; return the nodes that have an annotation."""
    module = torch.export.export(model.eval(), inputs, strict=strict).module()
    assert isinstance(module, GraphModule)
    quantizer = LayerQuantizer(options.pop("config", CONFIG), **options)
    assert quantizer.annotate(module) is module
    quantizer.validate(module)
    return [node for node in module.graph.nodes if ANNOTATION in node.meta]


class Layers(nn.Module):
    """Each kind of layer that can be quantized, as a module and as a function, and some that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv1d = nn.Conv1d(4, 4, 3, padding="same")
        self.conv2d = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.transposed = nn.ConvTranspose2d(4, 1, 3, padding=1)
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.kernel = nn.Parameter(torch.randn(1, 1, 3, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv1d(self.embed(tokens))
        x = self.transposed(self.conv2d(x[:, None]))
        x = functional.conv2d(x, self.kernel, padding="same")
        x = self.linear(functional.linear(x, self.weight))
        return functional.linear(x, x[0, 0, :, :] * 2) @ x


TOKENS = torch.arange(8).reshape(2, 4)


@pytest.mark.parametrize("strict", [False, True])
def test_every_layer_with_a_weight_has_the_recipe(*, strict: bool) -> None:
    nodes = annotated(Layers(), TOKENS, strict=strict)

    assert [str(node.target).split(".")[1] for node in nodes] == [
        *("embedding", "conv1d", "conv2d", "conv2d"),
        *("linear", "linear"),
    ]
    for node in nodes[1:]:
        assert is_layer(node)
        annotation = node.meta[ANNOTATION]
        assert annotation.input_qspec_map == {node.args[0]: ACTIVATION, node.args[1]: WEIGHT}
        assert annotation.output_qspec is None


def test_only_layers_that_have_a_kernel() -> None:
    def has_kernel(layer: Node) -> bool:
        return layer.target is aten.linear.default

    nodes = annotated(Layers(), TOKENS, has_kernel=has_kernel)

    assert [node.target for node in nodes if is_layer(node)] == [aten.linear.default] * 2


@pytest.mark.parametrize("strict", [False, True])
def test_only_inside_the_module_path(*, strict: bool) -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8), nn.ReLU()
    )

    nodes = annotated(model, torch.randn(2, 8), strict=strict, module_path="0.1")

    (node,) = nodes
    assert node.args[1].target == "0.1.weight"  # type: ignore[union-attr] # a node, as in every layer
    assert len(annotated(model, torch.randn(2, 8), strict=strict, module_path="0")) == 2


def test_annotations_of_another_quantizer_stay() -> None:
    module = torch.export.export(nn.Linear(8, 8), (torch.randn(2, 8),)).module()
    assert isinstance(module, GraphModule)
    (layer,) = module.graph.find_nodes(op="call_function", target=aten.linear.default)
    layer.meta[ANNOTATION] = "of another"
    LayerQuantizer(CONFIG).annotate(module)
    assert layer.meta[ANNOTATION] == "of another"


class Residual(nn.Module):
    def __init__(self, layer: nn.Module, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.body = layer, body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layer, x)


BODIES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "plus input": (lambda layer, x: layer(x) + x, True),
    "input plus": (lambda layer, x: torch.relu(x + layer(x)), True),
    "in place": (lambda layer, x: layer(x).add_(x), True),
    "plus itself": (lambda layer, x: sum([layer(x)] * 2), False),
    "plus a number": (lambda layer, x: layer(x) + 1.0, False),
    "broadcast": (lambda layer, x: layer(x) + x.mean(-1, keepdim=True), False),
    "scaled": (lambda layer, x: torch.add(layer(x), x, alpha=2), False),
    "read twice": (lambda layer, x: (y := layer(x)) + x * y.sum(), False),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_added_to_an_adding_layer(name: str) -> None:
    body, is_annotated = BODIES[name]
    model = Residual(nn.Conv2d(4, 4, 3, padding=1), body)
    x = torch.randn(2, 4, 6, 6)

    nodes = annotated(model, x, adding_layers=frozenset({aten.conv2d.default}))

    additions = [node for node in nodes if not is_layer(node)]
    assert len(additions) == is_annotated
    for addition in additions:
        ((other, added),) = addition.meta[ANNOTATION].input_qspec_map.items()
        assert added is ACTIVATION
        assert other.op == "placeholder"


def test_only_adding_layers_add() -> None:
    body, _ = BODIES["plus input"]
    x = torch.randn(2, 4, 6, 6)
    conv = Residual(nn.Conv2d(4, 4, 3, padding=1), body)
    linear = Residual(nn.Linear(6, 6), body)
    adding = frozenset({aten.conv2d.default})

    assert all(map(is_layer, annotated(conv, x)))
    assert all(map(is_layer, annotated(linear, x, adding_layers=adding)))


class Through(nn.Module):
    """A layer that a pool and another layer read, and a pool of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.head = nn.Linear(8 * 9, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        pooled = functional.max_pool2d(y, 2)
        beside = functional.max_pool2d(x, 2)
        y = self.head(torch.flatten(pooled, 1)) + self.second(y).mean((2, 3))
        return y + torch.flatten(beside, 1).mean(1, keepdim=True)


def test_what_int8_passes_through_shares_its_scale() -> None:
    nodes = [node for node in annotated(Through(), torch.randn(2, 3, 6, 6)) if not is_layer(node)]

    assert [node.target for node in nodes] == [aten.max_pool2d.default, aten.flatten.using_ints]
    for node in nodes:
        annotation, (source,) = node.meta[ANNOTATION], node.all_input_nodes
        assert annotation.input_qspec_map == {source: ACTIVATION}
        assert annotation.output_qspec.edge_or_node == (source, node)


def test_nothing_is_passed_through_where_kernels_write_float() -> None:
    nodes = annotated(Through(), torch.randn(2, 3, 6, 6), kernels_write_int8=False)

    assert len(nodes) == 3
    assert all(map(is_layer, nodes))


def test_a_measured_scale_is_for_layers_alone() -> None:
    dynamic = spec(torch.uint8, is_dynamic=True)
    config = QuantizationConfig(dynamic, None, WEIGHT, None, is_qat=False)
    x = torch.randn(2, 3, 6, 6)

    nodes = annotated(Through(), x, config=config, is_dynamic=True)

    assert len(nodes) == 3
    assert all(map(is_layer, nodes))
    assert all(dynamic in node.meta[ANNOTATION].input_qspec_map.values() for node in nodes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_layers_of_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 8, dtype=dtype)
    assert annotated(model, torch.randn(2, 8, dtype=dtype)) == []
