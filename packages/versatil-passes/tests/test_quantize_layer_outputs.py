"""When a quantize is put behind a layer already, and when the layer's result stays float."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from versatil_passes import QuantizeLayerOutputs

aten, qd = torch.ops.aten, torch.ops.quantized_decomposed
Params = tuple[float, int, int, int, torch.dtype]
U8: Params = (0.05, 117, 0, 255, torch.uint8)
OTHER: Params = (0.06, 117, 0, 255, torch.uint8)
WEIGHT = torch.nn.Parameter(torch.randn(4, 4, 1, 1), requires_grad=False)


def through(x: Tensor, params: Params = U8) -> Tensor:
    """Quantize and dequantize."""
    result: Tensor = qd.dequantize_per_tensor(qd.quantize_per_tensor(x, *params), *params)
    return result


def layer(x: Tensor) -> Tensor:
    return F.conv2d(through(x), WEIGHT)


def names(module: GraphModule) -> list[str]:
    """The ops, in order; all that a layer reads left out."""
    ops = [
        str(node.target).split(".")[1]
        for node in module.graph.nodes
        if "aten" in str(node.target) or "quant" in str(node.target)
    ]
    return ops[ops.index("conv2d") :]


def check(function: Callable[[Tensor], Any], moved: int, build: Any) -> GraphModule:
    """So many layers are quantized; the results are the same to the bit, and all nodes are still there."""
    x = 4 * torch.randn(2, 4, 6, 6)
    module: GraphModule = build.export(build.function(lambda _, x: function(x)), x)
    before = [node.name for node in module.graph.nodes]
    expected = module(x)

    assert QuantizeLayerOutputs()(module.graph) == moved
    module.graph.lint()
    module.recompile()

    added = {node.name for node in module.graph.nodes} - set(before)
    assert len(added) == 2 * moved
    assert [node.name for node in module.graph.nodes if node.name not in added] == before
    results = module(x) if isinstance(expected, tuple) else (module(x),)
    values = expected if isinstance(expected, tuple) else (expected,)
    assert all(map(torch.equal, results, values))
    assert QuantizeLayerOutputs()(module.graph) == 0
    return module


PAIR = ["quantize_per_tensor", "dequantize_per_tensor"]


def test_behind_a_layer(build: Any) -> None:
    module = check(lambda x: through(F.max_pool2d(layer(x), 2).relu()), 1, build)
    assert names(module) == ["conv2d", *PAIR, "max_pool2d", "relu", *PAIR]
    first, last = module.graph.find_nodes(
        op="call_function", target=qd.quantize_per_tensor.default
    )[1:]
    assert first.args[1:] == last.args[1:]
    assert first.meta["val"].dtype is torch.uint8


def test_behind_what_the_kernel_computes_too(build: Any) -> None:
    module = check(lambda x: through(F.max_pool2d((layer(x) + x).relu(), 2)), 1, build)
    assert names(module) == ["conv2d", "add", "relu", *PAIR, "max_pool2d", *PAIR]


def test_behind_each_of_several_layers(build: Any) -> None:
    module = check(lambda x: through(torch.cat([layer(x), layer(x.sin())], 1)), 2, build)
    quantizes = module.graph.find_nodes(op="call_function", target=qd.quantize_per_tensor.default)
    assert [node.args[0].name for node in quantizes if "int8" in node.name] == [
        "conv2d",
        "conv2d_1",
    ]


@pytest.mark.parametrize(("params", "moved"), [(U8, 1), (OTHER, 0)])
def test_beside_what_is_int8_already(params: Params, moved: int, build: Any) -> None:
    """Of another scale it has to become float in any case."""
    check(lambda x: through(torch.cat([layer(x), through(x, params)], 1)), moved, build)


def _read_twice(x: Tensor) -> Any:
    y = layer(x)
    return through(F.max_pool2d(y, 2)), y


def _pool_read_twice(x: Tensor) -> Any:
    y = F.max_pool2d(layer(x), 2)
    return through(y.relu()), y


def _written(x: Tensor) -> Tensor:
    y = F.max_pool2d(layer(x), 2)
    y[:, 0].add_(1.0)
    return through(y.relu())


STAYS: dict[str, Callable[[Tensor], Any]] = {
    "quantized already": lambda x: through(layer(x)),
    "average": lambda x: through(F.avg_pool2d(layer(x), 2)),
    "float between": lambda x: through(F.max_pool2d(layer(x).sin(), 2)),
    "float beside": lambda x: through(torch.cat([layer(x), x.sin()], 1)),
    "float layer": lambda x: through(F.max_pool2d(F.conv2d(x, WEIGHT), 2)),
    "another dtype": lambda x: through(
        F.max_pool2d(F.conv2d(through(x).double(), WEIGHT.double()), 2).float()
    ),
    "scale too small": lambda x: through(F.max_pool2d(layer(x), 2), (1e-40, *U8[1:])),
    "layer read twice": _read_twice,
    "pool read twice": _pool_read_twice,
    "written to": _written,
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_float(name: str, build: Any) -> None:
    check(STAYS[name], 0, build)


def test_a_part_that_nobody_reads_is_no_reader(build: Any) -> None:
    """Exporting lists all parts of a chunk."""
    check(lambda x: through(layer(x).chunk(2, 1)[1]), 1, build)


def test_identity() -> None:
    assert QuantizeLayerOutputs().uuid() == QuantizeLayerOutputs().uuid()
    assert QuantizeLayerOutputs()(symbolic_trace(lambda x: x.relu()).graph) == 0
