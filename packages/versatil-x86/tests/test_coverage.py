"""Every way to write a layer is int8 with an exact kernel, or has a reason: static and dynamic."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from versatil_core import audit, check_exactness, compile, lower, quantize, sqnr_db  # noqa: A004 -- the verb
from versatil_x86 import X86InductorBackend

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


class Model(nn.Module):
    """``function(self, *inputs)`` with some layers."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def conv(inputs: int = 8, outputs: int = 8, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def with_statistics(model: nn.Module) -> nn.Module:
    """Give batch norms something to do."""
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.weight)
    return model


def normed(layer: nn.Module, norm: nn.Module) -> nn.Module:
    return with_statistics(nn.Sequential(layer, norm, nn.ReLU()))


ROWS, WORDS = (4, 16), (2, 5, 16)
IMAGES, SIGNALS, VOLUMES = (2, 8, 10, 10), (2, 8, 20), (2, 8, 5, 6, 6)
# The model, the shape of its input, and the layers that are int8.
INT8: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "called twice, linear": (
        lambda: Model(lambda s, x: s.l(torch.tanh(s.l(x))), l=nn.Linear(16, 16)),
        ROWS,
        ("linear", "linear"),
    ),
    "called twice, conv": (
        lambda: Model(lambda s, x: s.c(torch.tanh(s.c(x))), c=conv()),
        IMAGES,
        ("conv2d", "conv2d"),
    ),
    "conv1d": (lambda: nn.Conv1d(8, 16, 3, bias=False), SIGNALS, ("conv1d",)),
    "conv2d": (lambda: conv(bias=False), IMAGES, ("conv2d",)),
    "conv3d": (lambda: nn.Conv3d(8, 16, 3, bias=False), VOLUMES, ("conv3d",)),
    "conv1d and norm": (
        lambda: normed(nn.Conv1d(8, 8, 3, bias=False), nn.BatchNorm1d(8)),
        SIGNALS,
        ("conv1d",),
    ),
    "conv2d and norm": (lambda: normed(conv(), nn.BatchNorm2d(8)), IMAGES, ("conv2d",)),
    "conv2d without bias and norm": (
        lambda: normed(conv(bias=False), nn.BatchNorm2d(8)),
        IMAGES,
        ("conv2d",),
    ),
    "conv3d and norm": (
        lambda: normed(nn.Conv3d(8, 8, 3), nn.BatchNorm3d(8)),
        VOLUMES,
        ("conv3d",),
    ),
    "linear and norm": (
        lambda: normed(nn.Linear(16, 8), nn.BatchNorm1d(8)),
        ROWS,
        ("linear",),
    ),
    "residual in front": (
        lambda: Model(lambda s, x: x + s.b(s.a(x).relu()), a=conv(), b=conv()),
        IMAGES,
        ("conv2d", "conv2d"),
    ),
    "residual behind": (
        lambda: Model(lambda s, x: s.b(s.a(x).relu()) + x, a=conv(), b=conv()),
        IMAGES,
        ("conv2d", "conv2d"),
    ),
    "residual of a linear": (
        lambda: Model(
            lambda s, x: x + s.b(s.a(x).relu()), a=nn.Linear(16, 32), b=nn.Linear(32, 16)
        ),
        ROWS,
        ("linear", "linear"),
    ),
    "a scalar is added": (lambda: Model(lambda s, x: s.a(x) + 1.5, a=conv()), IMAGES, ("conv2d",)),
    "a broadcast is added": (
        lambda: Model(lambda s, x: s.a(x) + x[:, :1, :1], a=conv()),
        IMAGES,
        ("conv2d",),
    ),
    "added in place": (lambda: Model(lambda s, x: s.a(x).add_(x), a=conv()), IMAGES, ("conv2d",)),
    "added to itself": (
        lambda: Model(lambda s, x: (y := s.a(x)) + y, a=conv()),
        IMAGES,
        ("conv2d",),
    ),
    "a weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)),
        ROWS,
        ("linear",),
    ),
    "attention": (
        lambda: Model(
            lambda s, x: s.m(x, x, x, need_weights=False)[0],
            m=nn.MultiheadAttention(16, 4, batch_first=True),
        ),
        WORDS,
        ("linear", "linear"),
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        WORDS,
        ("linear",) * 4,
    ),
}
FLOAT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str]] = {
    "upsampling": (
        lambda: Model(lambda s, x: s.u(s.c(x)), c=conv(), u=nn.ConvTranspose2d(8, 4, 2, 2)),
        IMAGES,
        "conv_transpose2d",
        "nn.Upsample followed by a convolution",
    ),
    "lstm": (
        lambda: Model(lambda s, x: s.l(s.r(x)[0]), r=nn.LSTM(16, 16), l=nn.Linear(16, 4)),
        WORDS,
        "lstm",
        "written as nn.Linear",
    ),
    "gru": (
        lambda: Model(lambda s, x: s.l(s.r(x)[0]), r=nn.GRU(16, 16), l=nn.Linear(16, 4)),
        WORDS,
        "gru",
        "written as nn.Linear",
    ),
}


def cases() -> list[Any]:
    """Each model, static and dynamic; some versions of torch have no kernel for a dynamic convolution."""
    takes_kernel = pytest.mark.dynamic_convolution
    return [
        pytest.param(
            name, is_dynamic, marks=[takes_kernel] * (is_dynamic and "conv" in str(layers))
        )
        for name, (_, _, layers) in INT8.items()
        for is_dynamic in (False, True)
    ]


@pytest.mark.parametrize(("name", "is_dynamic"), cases())
def test_int8_and_exact(name: str, *, is_dynamic: bool) -> None:
    torch.manual_seed(0)
    make, shape, layers = INT8[name]
    model, x = make(), torch.randn(shape)  # in training mode, as it may come
    backend = X86InductorBackend(is_dynamic=is_dynamic, saturation="safe")

    reference = quantize(model, x, backend, None if is_dynamic else [x])

    found = audit(reference, backend).layers
    assert tuple(layer.op for layer in found if layer.is_int8) == layers
    assert all(layer.op == "scaled_dot_product_attention" for layer in found if not layer.is_int8)
    norms = [node for node in reference.graph.nodes if "batch_norm" in str(node.target)]
    # torchao 0.15, of torch 2.9, leaves the one behind a linear.
    assert not norms or name == "linear and norm"
    check_exactness(reference, lower(reference, backend), (3 * x,)).raise_if_inexact()
    assert sqnr_db(reference(x), model.eval()(x)) > 20


# torch's own word about how nn.LSTM keeps its weights.
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
@pytest.mark.parametrize(("name", "is_dynamic"), [*itertools.product(FLOAT, (False, True))])
def test_float_with_a_reason(name: str, *, is_dynamic: bool) -> None:
    torch.manual_seed(0)
    make, shape, op, reason = FLOAT[name]
    model, x = make().eval(), torch.randn(shape)
    backend = X86InductorBackend(is_dynamic=is_dynamic, saturation="safe")

    reference = quantize(model, x, backend, None if is_dynamic else [x])

    [layer] = [layer for layer in audit(reference, backend).layers if layer.op == op]
    assert not layer.is_int8
    assert reason in str(layer.reason)


@pytest.mark.parametrize(
    "name",
    [
        "conv3d and norm",
        "added in place",
        "added to itself",
        "residual behind",
        "a broadcast is added",
        "encoder",
    ],
)
def test_compiled(name: str) -> None:
    torch.manual_seed(0)
    make, shape, _ = INT8[name]
    x, backend = torch.randn(shape), X86InductorBackend(saturation="safe")
    before = x.clone()
    reference = quantize(make().eval(), x, backend, [x])

    compiled = compile(reference, backend)

    assert (
        sqnr_db(compiled(x), reference(x)) > 40
    )  # a rounding of Inductor's may end on the other side
    assert torch.equal(x, before)
