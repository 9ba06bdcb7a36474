"""Between which ops one scale is shared, so that int8 can pass through all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from versatil_core.annotations import ANNOTATION
from versatil_core.layer_quantizer import LayerQuantizer, is_layer

ACTIVATION, WEIGHT = (
    QuantizationSpec(dtype=dtype, observer_or_fake_quant_ctr=MinMaxObserver)
    for dtype in (torch.uint8, torch.int8)
)
CONFIG = QuantizationConfig(ACTIVATION, ACTIVATION, WEIGHT, None, is_qat=False)
Body = Callable[[Any, Tensor], Any]


class Layers(nn.Module):
    """Two layers in front, one behind; a test says what lies between."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.a, self.b, self.end = (nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def annotated(body: Body) -> list[Node]:
    """The annotated nodes that are no layers."""
    module = torch.export.export(Layers(body), (torch.randn(2, 4, 8, 8),)).module()
    assert isinstance(module, GraphModule)
    LayerQuantizer(CONFIG).annotate(module)
    return [n for n in module.graph.nodes if ANNOTATION in n.meta and not is_layer(n)]


def pool(x: Tensor) -> Tensor:
    return functional.max_pool2d(x, 2)


def _read_twice(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    return m.end(pool(y)), m.end(y)


def _dense(m: Any, x: Tensor) -> Any:
    y, z = m.a(x), m.b(x)
    return m.end(torch.cat([y, z], 2)), m.end(torch.cat([z, y], 3))


def _part(m: Any, x: Tensor) -> Any:
    left, right = m.a(x).chunk(2, 2)
    return m.end(left), m.end(torch.cat([right, left], 3))


def _far_end(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    return m.end(pool(y).transpose(2, 3)), m.end(y)


def _gated(m: Any, x: Tensor) -> Any:
    y = pool(m.a(x))
    return m.end(y) * y


SHARED: dict[str, tuple[Body, list[str]]] = {
    "average": (lambda m, x: m.end(functional.avg_pool2d(m.a(x), 2)), ["avg_pool2d"]),
    "read as float, too": (_gated, ["max_pool2d"]),
    "read twice": (_read_twice, ["max_pool2d"]),
    "joined twice": (_dense, ["cat", "cat"]),
    "parts": (_part, ["chunk", "getitem", "getitem", "cat"]),
    "views on the way": (_far_end, ["max_pool2d", "transpose"]),
}


def _bound_read_twice(m: Any, x: Tensor) -> Any:
    y = pool(m.a(x))
    return m.end(y.relu()), m.end(y)


def _result_of_the_model(m: Any, x: Tensor) -> Any:
    y = m.end(m.a(x))
    return pool(y), y.flatten(1)


NOT_SHARED: dict[str, Body] = {
    # The quantize of the last one moves to the layer, with the range of what is left there.
    "pool alone": lambda m, x: m.end(pool(m.a(x))),
    "pool and relu": lambda m, x: m.end(pool(m.a(x)).relu()),
    "concatenation": lambda m, x: m.end(torch.cat([m.a(x), m.b(x).relu()], 2)),
    "of float": lambda m, x: m.end(pool(x.sin())),
    "of float beside": lambda m, x: m.end(torch.cat([functional.avg_pool2d(x, 1), m.a(x)], 2)),
    "to float": lambda m, x: functional.avg_pool2d(m.a(x), 2).sin(),
    "result of the model": _result_of_the_model,
    # A relu's result has a smaller range than what another reads.
    "bound read beside": _bound_read_twice,
}


def name_of(node: Node) -> str:
    return str(node.target).split(".")[1] if "." in str(node.target) else "getitem"


@pytest.mark.parametrize("name", SHARED)
def test_it_shares_a_scale(name: str) -> None:
    body, expected = SHARED[name]
    nodes = annotated(body)

    assert [name_of(node) for node in nodes] == expected
    for node in nodes:
        annotation = node.meta[ANNOTATION]
        if name_of(node) == "chunk":  # its result is no tensor
            assert (list(annotation.input_qspec_map.values()), annotation.output_qspec) == (
                [ACTIVATION],
                None,
            )
            continue
        reader = node.all_input_nodes[0] if name_of(node) == "getitem" else node
        first, *others = reader.all_input_nodes
        assert annotation.output_qspec.edge_or_node == (first, reader)
        if reader is node:
            assert annotation.input_qspec_map[first] is ACTIVATION
            shared = [annotation.input_qspec_map[other].edge_or_node for other in others]
            assert shared == [(first, node)] * len(others)


@pytest.mark.parametrize("name", NOT_SHARED)
def test_it_needs_no_scale_or_keeps_its_own(name: str) -> None:
    assert annotated(NOT_SHARED[name]) == []
