from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from versatil_passes.float_layers import FLOAT_LAYERS, LINEAR_AND_CONV, conv_geometry, post_op_of

aten, qd = torch.ops.aten, torch.ops.quantized_decomposed


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (aten.relu.default, (), {}, ("relu", ())),
        (aten.relu_.default, (), {}, ("relu", ())),
        (aten.hardswish.default, (), {}, ("hardswish", ())),
        (aten.hardswish_.default, (), {}, ("hardswish", ())),
        (aten.silu.default, (), {}, ("silu", ())),
        (aten.silu_.default, (), {}, ("silu", ())),
        (aten.relu6.default, (), {}, ("hardtanh", (0.0, 6.0))),
        (aten.relu6_.default, (), {}, ("hardtanh", (0.0, 6.0))),
        (aten.hardtanh.default, (), {}, ("hardtanh", (-1.0, 1.0))),
        (aten.hardtanh.default, (-2,), {}, ("hardtanh", (-2.0, 1.0))),
        (aten.hardtanh_.default, (0, 3), {}, ("hardtanh", (0.0, 3.0))),
        (aten.clamp.default, (0, 3), {}, ("hardtanh", (0.0, 3.0))),
        (aten.clamp_.default, (-0.5, 0.5), {}, ("hardtanh", (-0.5, 0.5))),
        (aten.clamp.default, (0,), {"max": 3}, ("hardtanh", (0.0, 3.0))),
        (aten.hardtanh.default, (), {"min_val": -2.0, "max_val": 2.0}, ("hardtanh", (-2.0, 2.0))),
        (aten.gelu.default, (), {}, ("gelu", ())),
        (aten.gelu.default, (), {"approximate": "none"}, ("gelu", ())),
        (aten.gelu.default, (), {"approximate": "tanh"}, ("gelu_tanh", ())),
        # one bound, bounds that cross (clamp then gives the upper one everywhere), and other functions
        (aten.clamp.default, (0,), {}, None),
        (aten.clamp.default, (None, 1), {}, None),
        (aten.clamp.default, (2, 1), {}, None),
        (aten.sigmoid.default, (), {}, None),
        (aten.leaky_relu.default, (0.1,), {}, None),
    ],
)
def test_post_ops(target: Any, args: Any, kwargs: Any, expected: Any) -> None:
    graph = Graph()
    node = graph.call_function(target, (graph.placeholder("x"), *args), kwargs)
    assert post_op_of(node) == expected


def test_a_clamp_between_tensors_is_no_post_op() -> None:
    graph = Graph()
    x, low, high = (graph.placeholder(name) for name in ("x", "low", "high"))
    assert post_op_of(graph.call_function(aten.clamp.default, (x, low, high))) is None
    assert post_op_of(graph.call_function(aten.clamp.Tensor, (x, low, high))) is None


def _geometry(target: Any, kernel: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    module = torch.nn.Module()
    module.register_buffer("weight", torch.zeros(4, 2, *kernel, dtype=torch.int8))
    graph = Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    params = (weight, 0.1, 0, -127, 127, torch.int8)
    weight = graph.call_function(qd.dequantize_per_tensor.default, params)
    node = graph.call_function(target, (x, weight, None, *args), kwargs)
    graph.output(node)
    GraphModule(module, graph)
    return conv_geometry(node)


@pytest.mark.parametrize(
    ("target", "kernel", "args", "expected"),
    [
        (aten.conv2d.default, (3, 3), (), ([1, 1], [0, 0], [1, 1], 1)),
        (aten.conv2d.default, (3, 3), ([2], [1], [3], 2), ([2, 2], [1, 1], [3, 3], 2)),
        (aten.conv2d.default, (3, 3), ([2, 1], [0, 1]), ([2, 1], [0, 1], [1, 1], 1)),
        (aten.conv2d.padding, (3, 5), ([1, 1], "same"), ([1, 1], [1, 2], [1, 1], 1)),
        (aten.conv2d.padding, (2, 3), ([1, 1], "same", [2, 1]), ([1, 1], [1, 1], [2, 1], 1)),
        (aten.conv2d.padding, (3, 3), ([2, 2], "valid"), ([2, 2], [0, 0], [1, 1], 1)),
        (aten.conv1d.default, (3,), ([2], [1], [1], 4), ([2], [1], [1], 4)),
        (aten.conv1d.padding, (5,), ([1], "same"), ([1], [2], [1], 1)),
    ],
)
def test_geometry(target: Any, kernel: Any, args: Any, expected: Any) -> None:
    assert _geometry(target, kernel, *args) == expected


def test_geometry_given_by_keyword() -> None:
    given = {"stride": [2, 2], "padding": [1, 0], "groups": 2}
    assert _geometry(aten.conv2d.default, (3, 3), **given) == ([2, 2], [1, 0], [1, 1], 2)


@pytest.mark.parametrize(
    ("target", "kernel"), [(aten.conv2d.padding, (3, 2)), (aten.conv1d.padding, (4,))]
)
def test_asymmetric_padding_is_explained(target: Any, kernel: tuple[int, ...]) -> None:
    reason = _geometry(target, kernel, [1], "same")
    assert "asymmetric padding" in reason
    assert str(list(kernel)) in reason
    assert "give the padding in numbers" in reason


def test_what_can_be_lowered_is_listed() -> None:
    assert set(FLOAT_LAYERS.values()) >= LINEAR_AND_CONV
