"""Transposed convolutions before arithmetic: right when frozen, and left alone elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from versatil_passes import KeepTransposedConvolutions, PassChain, pre_grad_passes

FOLLOWED_BY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": lambda y, _: y * 3.0,
    "a sum in place": lambda y, _: y.add_(2.0),
    "a view and a quotient": lambda y, _: y.flatten(1) / 3.0,
    "dropped operators and a product": lambda y, _: (
        nn.functional.dropout(y.float().clone(), training=False) * 3.0
    ),
    "a factor for each channel": lambda y, factors: y * factors,
}


class Upsampling(nn.Module):
    factors: Tensor

    def __init__(self, then: Callable[[Tensor, Tensor], Tensor], channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, 4, 2, stride=2)
        self.then = then
        # A constant of the frozen graph.
        self.register_buffer("factors", torch.arange(1.0, 5.0)[None, :, None, None].clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.up(x), self.factors)


def exported(model: nn.Module, x: Tensor) -> GraphModule:
    module = torch.export.export(model.eval(), (x,)).module()
    assert isinstance(module, GraphModule)
    return module


@pytest.mark.parametrize("channels", [16, 4])
@pytest.mark.parametrize("then", FOLLOWED_BY.values(), ids=FOLLOWED_BY)
def test_frozen_results_are_right(then: Callable[[Tensor, Tensor], Tensor], channels: int) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, channels, 3, 3)
    module = exported(Upsampling(then, channels), x)
    expected = module(x)

    with (
        torch.no_grad(),
        torch._inductor.config.patch(freezing=True),
        pre_grad_passes(PassChain(KeepTransposedConvolutions())),
    ):
        result = torch.compile(module)(x)

    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("then", FOLLOWED_BY.values(), ids=FOLLOWED_BY)
def test_eager_results_are_equal(then: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.rand(2, 16, 3, 3)
    module = exported(Upsampling(then, 16), x)
    expected = module(x)

    assert KeepTransposedConvolutions()(module.graph) == 1
    module.graph.lint()
    module.recompile()

    assert torch.equal(module(x), expected)


@pytest.mark.parametrize(
    "model",
    [
        Upsampling(lambda y, _: y.relu(), 16),
        Upsampling(lambda y, _: y.flatten(1).relu(), 16),
        nn.Sequential(nn.Conv2d(16, 4, 2), nn.Flatten()),
        nn.ConvTranspose2d(16, 4, 2),
    ],
    ids=["relu", "view and relu", "convolution", "alone"],
)
def test_what_is_not_folded_is_left_alone(model: nn.Module) -> None:
    module = exported(model, torch.rand(2, 16, 3, 3))
    before: Any = str(module.graph)

    assert KeepTransposedConvolutions()(module.graph) == 0
    assert str(module.graph) == before


def test_uuid_is_stable() -> None:
    assert KeepTransposedConvolutions().uuid() == KeepTransposedConvolutions().uuid()
