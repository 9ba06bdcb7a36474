"""Products with weights in every form become linear layers, and computed weights parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.fx import GraphModule

from versatil_core import audit, quantize
from versatil_core.export import export
from versatil_core.linear_forms import einsum_form

aten = torch.ops.aten


class Given(nn.Module):
    """``function(self, *inputs)`` with parameters ``w`` of 16 inputs and 8 outputs and ``b``."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.w = nn.Parameter(torch.randn(8, 16))
        self.v = nn.Parameter(torch.randn(16, 8))
        self.b = nn.Parameter(torch.randn(8))
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def targets(module: GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def names(module: GraphModule) -> set[str]:
    return {name for name, _ in module.named_parameters()}


X, X3 = torch.randn(4, 16), torch.randn(2, 5, 16)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("function", "x", "kept"),
    [
        (lambda s, x: F.linear(x, s.w, s.b), X, {"w", "b"}),
        (lambda s, x: x @ s.w.t(), X, {"w"}),
        (lambda s, x: x @ s.w.T, X3, {"w"}),
        (lambda s, x: torch.matmul(x, s.v), X3, {"v"}),
        (lambda s, x: torch.mm(x, s.v), X, {"v"}),
        (lambda s, x: x @ s.v + s.b, X3, {"v", "b"}),
        (lambda s, x: s.b + x @ s.w.mT, X3, {"w", "b"}),
        (lambda s, x: torch.addmm(s.b, x, s.v), X, {"v", "b"}),
        (lambda s, x: torch.addmm(s.b, x, s.w.t()), X, {"w", "b"}),
        (lambda s, x: torch.einsum("bi,oi->bo", x, s.w), X, {"w"}),
        (lambda s, x: torch.einsum("...i, io -> ...o", x, s.v), X3, {"v"}),
        (lambda s, x: F.linear(x, F.normalize(s.w, dim=1)), X, {"w"}),
    ],
)
def test_all_are_one_linear(
    linear_backend: Callable[..., Any],
    function: Callable[..., Tensor],
    x: Tensor,
    kept: set[str],
    strict: bool,
) -> None:
    model = Given(function)

    exported = export(model, x, strict=strict)

    assert targets(exported) == [aten.linear.default]
    assert names(exported) & {"w", "v", "b"} >= kept
    torch.testing.assert_close(exported(x), model(x))
    backend = linear_backend()
    [layer] = audit(quantize(model, x, backend, [x], strict=strict), backend).layers
    assert layer.is_int8, layer


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda _, x: x @ x.transpose(-1, -2), (X3,)),  # two activations
        (lambda s, x: torch.addmm(s.b, x, s.v, alpha=2.0), (X,)),
        (lambda s, x: torch.addmm(s.b[:4, None].expand(4, 8), x, s.v), (X,)),
        (lambda s, x: x @ s.v, (torch.randn(16),)),  # a vector
        (lambda s, x: s.w @ x.t(), (X,)),  # the weight first
        (lambda s, x: torch.einsum("bi,oi->ob", x, s.w), (X,)),
    ],
)
def test_what_is_no_linear_stays(function: Callable[..., Tensor], inputs: tuple[Tensor]) -> None:
    model = Given(function)
    exported = export(model, inputs)

    assert aten.linear.default not in targets(exported)
    torch.testing.assert_close(exported(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("bsi,io->bso", True),
        ("bsi,oi->bso", False),
        ("...i,oi->...o", False),
        (" b i , i o -> b o ", True),
        ("bi,io", None),  # what it returns is implied
        ("bij,bjk->bik", None),
        ("bi,io->ob", None),
        ("bii,io->bio", None),
        ("bi,bo->bo", None),
        ("bi,io->bi", None),
        ("i...,io->i...", None),
        ("bi,...o->bo", None),
        ("bi,io,oj->bj", None),
        ("b,io->bo", None),
    ],
)
def test_einsum(equation: str, expected: bool | None) -> None:
    assert einsum_form(equation) is expected


def test_a_bias_that_others_read_is_added_by_all() -> None:
    model = Given(lambda s, x: (x @ s.v + s.b) * s.b)

    exported = export(model, X)

    assert targets(exported) == [aten.linear.default, aten.mul.Tensor]
    torch.testing.assert_close(exported(X), model(X))


def test_a_sum_that_is_read_in_between_stays() -> None:
    """The product is read twice, once without the bias."""
    model = Given(lambda s, x: (y := x @ s.v) * (y + s.b))

    exported = export(model, X)

    assert targets(exported).count(aten.add.Tensor) == 1
    torch.testing.assert_close(exported(X), model(X))


def test_a_product_stays_before_what_writes_to_its_input() -> None:
    def function(s: Any, x: Tensor) -> Tensor:
        x = x * 1
        y = x @ s.v
        x.add_(1)
        return y + s.b

    model = Given(function)

    exported = export(model, X)

    torch.testing.assert_close(exported(X), model(X))


def test_a_bias_of_another_dtype_is_no_bias() -> None:
    model = Given(lambda s, x: x @ s.v + s.b.double())

    exported = export(model, X)

    assert aten.add.Tensor in targets(exported)
    assert exported(X).dtype == torch.float64
    # The product itself is float32.
    torch.testing.assert_close(exported(X), model(X), rtol=1e-5, atol=1e-5)


def test_a_bias_of_another_shape_is_no_bias() -> None:
    model = Given(lambda s, x: x @ s.v + s.b[:1])

    exported = export(model, X)

    assert aten.add.Tensor in targets(exported)
    torch.testing.assert_close(exported(X), model(X))


@pytest.mark.parametrize("strict", [False, True])
def test_a_transformer_layer_in_both_modes(strict: bool) -> None:
    """Strict mode used to capture one fused operator, in which nothing could be quantized."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    enabled = torch.backends.mha.get_fastpath_enabled()

    exported = export(model, X3, strict=strict)

    assert torch.backends.mha.get_fastpath_enabled() is enabled
    assert targets(exported).count(aten.linear.default) == 4
    torch.testing.assert_close(exported(X3), model(X3))


def test_the_fast_path_is_back_after_a_failure() -> None:
    with pytest.raises(Exception, match="cannot capture"):
        export(Given(lambda _, x: x if x.sum() > 0 else -x), X)

    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("packed", [True, False])
def test_cross_attention(linear_backend: Callable[..., Any], strict: bool, packed: bool) -> None:
    """It cuts the packed weight, and the bias, in pieces."""
    torch.manual_seed(0)
    size = 16 if packed else 12
    attention = nn.MultiheadAttention(16, 4, batch_first=True, kdim=size, vdim=size).eval()
    memory = torch.randn(2, 7, size)
    model = Given(lambda s, x, y: s.attention(x, y, y)[0], attention=attention).eval()
    backend = linear_backend()

    reference = quantize(model, (X3, memory), backend, [(X3, memory)], strict=strict)

    linears = [layer for layer in audit(reference, backend).layers if layer.op == "linear"]
    assert len(linears) == (3 if packed else 4)
    assert all(layer.is_int8 for layer in linears)
    assert {layer.module_path for layer in linears} <= {"attention", "attention.out_proj"}
    # The packed one is gone; its pieces have its name.
    in_proj = {name for name in dict(reference.named_buffers()) if "in_proj_weight" in name}
    assert bool(in_proj) is packed


def test_a_weight_norm_is_computed_once() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))
    model = Given(lambda s, x: s.linear(x), linear=linear)

    exported = export(model, X)

    assert targets(exported) == [aten.linear.default]
    assert len(names(exported) - {"w", "v", "b"}) == 2  # a weight and a bias
    torch.testing.assert_close(exported(X), model(X))


def test_equal_computations_are_one_parameter() -> None:
    model = Given(lambda s, x: F.relu(x @ s.v) + torch.sigmoid(x @ s.v))

    exported = export(model, X)

    linears = exported.graph.find_nodes(op="call_function", target=aten.linear.default)
    assert len(linears) == 2
    assert len({node.args[1] for node in linears}) == 1
    torch.testing.assert_close(exported(X), model(X))


def test_a_constant_that_goes_into_another() -> None:
    model = Given(lambda s, x: F.linear(F.linear(x, w := F.normalize(s.w)), F.normalize(w.t())))

    exported = export(model, X)

    assert targets(exported) == [aten.linear.default, aten.linear.default]
    torch.testing.assert_close(exported(X), model(X))


def test_a_head_that_shares_the_table_of_words_keeps_sharing() -> None:
    words = nn.Embedding(50, 16)
    model = Given(lambda s, i: s.words(i) @ s.words.weight.t(), words=words)
    indices = torch.randint(0, 50, (4, 5))

    exported = export(model, indices)

    assert targets(exported) == [aten.embedding.default, aten.linear.default]
    assert "words.weight" in names(exported)
    assert exported.get_parameter("words.weight").shape == (50, 16)
    torch.testing.assert_close(exported(indices), model(indices))


class Counting(nn.Module):
    """Its weight is a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(16))

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.t()
        self.weight.add_(1)
        return y


def test_what_the_model_writes_to_is_no_weight() -> None:
    exported = export(Counting(), X)

    first, second = exported(X), exported(X)

    torch.testing.assert_close(first, X)
    torch.testing.assert_close(second, X + X.sum(1, keepdim=True))


def test_what_is_drawn_at_random_is_no_weight() -> None:
    model = Given(lambda s, x: x @ torch.bernoulli(torch.sigmoid(s.v)))

    exported = export(model, X)

    assert aten.bernoulli.default in targets(exported)


def test_dynamic_sizes() -> None:
    batch = torch.export.Dim("batch")
    model = Given(lambda s, x: torch.einsum("bsi,io->bso", x, s.v) + s.b)

    exported = export(model, X3, dynamic_shapes={"inputs": ({0: batch},)})

    assert targets(exported) == [aten.linear.default]
    more = torch.randn(7, 5, 16)
    torch.testing.assert_close(exported(more), model(more))
