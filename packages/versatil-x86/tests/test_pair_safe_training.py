"""Training under the bound: what the fake quantization computes is what the converted model computes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import (
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    move_exported_model_to_eval,
)
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

from versatil_core import check_exactness, lower, sqnr_db
from versatil_x86 import X86InductorBackend
from versatil_x86.pair_safe_observer import PairSafePerChannelFakeQuantize
from versatil_x86.pair_safe_weights import PAIRS_WITHOUT_VNNI, plain_scale, round_within_pairs

TRAINING = X86InductorBackend(is_qat=True, saturation="safe")

# torch's, of copying a prepared model
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


def prepared_for_training(model: nn.Module, x: Tensor) -> GraphModule:
    exported = torch.export.export(model.train(), (x,)).module()
    prepared: GraphModule = prepare_qat_pt2e(exported, TRAINING.create_quantizer())
    return prepared


def train(prepared: GraphModule, x: Tensor, steps: int) -> list[float]:
    """Train towards a large mean, which makes weights positive: what saturates. Ends with a step of the optimizer."""
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        loss = (prepared(x) - 3.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fakes_of(prepared: GraphModule) -> list[PairSafePerChannelFakeQuantize]:
    fakes = (m for m in prepared.modules() if isinstance(m, PairSafePerChannelFakeQuantize))
    return list(fakes)


def assert_cannot_saturate(reference: GraphModule, layers: int) -> None:
    constants = {**dict(reference.named_buffers()), **dict(reference.named_parameters())}
    weights = [value for value in constants.values() if value.dtype is torch.int8]
    assert len(weights) == layers
    for weight in weights:
        assert (PAIRS_WITHOUT_VNNI.largest_sums(weight) <= 128).all()


class Network(nn.Module):
    """A linear, convolutions with and without batch norm, grouped and depthwise."""

    def __init__(self, *, has_norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.depthwise = nn.Conv2d(8, 8, 1, groups=8)
        self.norm: nn.Module = nn.BatchNorm2d(8) if has_norm else nn.Identity()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.grouped(self.stem(x)))
        y = torch.relu(self.norm(self.depthwise(y)))
        return self.head(y.mean((2, 3)))


# With a batch norm torchao traces its patterns for half a minute: once is enough.
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "batch norm"])
def test_training_sees_what_the_converted_model_computes(*, has_norm: bool) -> None:
    x = torch.rand(8, 3, 8, 8)
    prepared = prepared_for_training(Network(has_norm=has_norm), x)
    assert len(fakes_of(prepared)) == 4
    untrained = copy.deepcopy(prepared)

    losses = train(prepared, x, 6)
    resumed = untrained  # another process, say, that has run nothing yet
    resumed.load_state_dict(prepared.state_dict())
    assert torch.equal(fakes_of(resumed)[0].scale, fakes_of(prepared)[0].scale)
    losses += train(resumed, x, 6)
    train(prepared, x, 6)

    assert losses[-1] < losses[0]
    for mine, other in zip(prepared.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, other)  # saving and loading in the middle changes nothing

    evaluated = copy.deepcopy(resumed)
    move_exported_model_to_eval(evaluated)
    disable_observers_of_activations(evaluated)
    with torch.no_grad():
        trained = evaluated(x)
    reference = convert_pt2e(resumed)  # the optimizer has moved its weights since it ran last
    assert_cannot_saturate(reference, 4)
    # A folded batch norm multiplies in another order.
    assert sqnr_db(reference(x), trained) > (60 if has_norm else 100)
    assert not any("batch_norm" in str(node.target) for node in reference.graph.nodes)
    assert_exact(reference, x)


def disable_observers_of_activations(prepared: GraphModule) -> None:
    """Otherwise evaluation moves their averages."""
    for module in prepared.modules():
        if not isinstance(module, PairSafePerChannelFakeQuantize):
            disable_observer(module)


def assert_exact(reference: GraphModule, x: Tensor) -> None:
    backend = X86InductorBackend()
    lowered = lower(reference, backend)
    record = lowered.meta["versatil_lowering"]
    assert len(record.lowered) == 4
    assert not any(op.may_saturate for op in record.lowered)
    for scale in (1, 10):
        check_exactness(reference, lowered, (scale * x,)).raise_if_inexact()


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda w: w,
    "all positive": lambda w: w.abs() + 0.1,
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("shape", [(4, 9), (3, 261), (4, 3, 3, 3), (6, 1, 3)])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_fake_quantization_is_the_int8_weight(kind: str, shape: tuple[int, ...]) -> None:
    weight = WEIGHTS[kind](torch.randn(shape)).requires_grad_()
    fake = PairSafePerChannelFakeQuantize()

    result = fake(weight)

    quantized = round_within_pairs(weight.detach(), plain_scale(weight.detach(), 255), 255)
    assert torch.equal(result, quantized.dequantize())
    assert torch.equal(fake.calculate_qparams()[0], quantized.scale)
    assert fake.calculate_qparams()[1].tolist() == [0] * len(weight)
    # The gradient goes through as it is: nothing is clipped.
    result.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(shape))


def test_the_scale_follows_the_weight() -> None:
    fake, weight = PairSafePerChannelFakeQuantize(), torch.randn(4, 8)
    fake(weight)
    first = fake.scale

    fake(weight / 2)

    torch.testing.assert_close(fake.scale, first / 2)


def test_disabled_observers_keep_scales_unless_a_weight_outgrows_them() -> None:
    fake, weight = PairSafePerChannelFakeQuantize(), torch.randn(2, 8)
    fake(weight)
    kept = fake.scale
    disable_observer(fake)

    fake(weight / 2)
    assert torch.equal(fake.scale, kept)

    result = fake(torch.stack([weight[0] / 2, weight[1] * 2]))
    assert fake.scale[0] == kept[0]
    torch.testing.assert_close(fake.scale[1], kept[1] * 2)
    values = (result / fake.scale[:, None]).round().to(torch.int8)
    assert (PAIRS_WITHOUT_VNNI.largest_sums(values) <= 128).all()


def test_a_disabled_observer_needs_a_first_scale_all_the_same() -> None:
    fake, weight = PairSafePerChannelFakeQuantize(), torch.randn(2, 8)
    disable_observer(fake)

    assert sqnr_db(fake(weight), weight) > 30


def test_fake_quantization_can_be_switched_off() -> None:
    fake, weight = PairSafePerChannelFakeQuantize(), torch.randn(2, 8)
    disable_fake_quant(fake)
    assert torch.equal(fake(weight), weight)

    enable_fake_quant(fake)
    assert not torch.equal(fake(weight), weight)


@pytest.mark.parametrize("has_run", [False, True])
def test_the_state_of_a_module_that_has_run_can_be_loaded(*, has_run: bool) -> None:
    trained, fresh = PairSafePerChannelFakeQuantize(), PairSafePerChannelFakeQuantize()
    trained(torch.randn(3, 8))
    if has_run:
        fresh(torch.randn(5, 8))  # of another size

    fresh.load_state_dict(trained.state_dict())

    assert torch.equal(fresh.scale, trained.scale)
    assert fresh.scale is not trained.scale


def test_a_state_without_the_scale_is_refused() -> None:
    state = PairSafePerChannelFakeQuantize().state_dict()
    del state["scale"]

    with pytest.raises(RuntimeError, match="scale"):
        PairSafePerChannelFakeQuantize().load_state_dict(state)


def test_dynamic_activations() -> None:
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.rand(8, 16)
    backend = X86InductorBackend(is_qat=True, is_dynamic=True, saturation="safe")
    exported = torch.export.export(model.train(), (x,)).module()
    prepared = prepare_qat_pt2e(exported, backend.create_quantizer())

    losses = train(prepared, x, 5)

    assert losses[-1] < losses[0]
    move_exported_model_to_eval(prepared)
    wanted = prepared(x)
    reference = convert_pt2e(prepared)
    assert_cannot_saturate(reference, 2)
    assert sqnr_db(reference(x), wanted) > 100
