"""Quantization-aware training with an ordinary loop: modes, state, freezing, and what the reference computes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import disable_fake_quant, disable_observer

from versatil_core import (
    CalibrationError,
    InputError,
    TrainingUnsupportedError,
    convert,
    freeze_batch_norm_statistics,
    freeze_ranges,
    load,
    prepare_qat,
    quantize,
    reference_info,
    save,
    sqnr_db,
)

aten = torch.ops.aten


class Network(nn.Module):
    """Convolutions with batch norm, a residual block that is called twice, linears, a norm of its own, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6())
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4, eps=1e-2, momentum=0.3)
        self.own = nn.BatchNorm2d(4, momentum=None)
        self.linear = nn.Linear(4, 8)
        self.linear_norm = nn.BatchNorm1d(8, affine=False)
        self.dropout = nn.Dropout(0.4)
        self.head = nn.Linear(8, 3)

    def block(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(self.block(self.block(self.stem(x))))
        x = self.dropout(torch.relu(self.linear_norm(self.linear(x.mean((2, 3))))))
        result: Tensor = self.head(x)
        return result


X = torch.randn(16, 2, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (module(X) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def copied_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    mine = module.state_dict()
    assert [*mine] == [*state]
    different = [name for name, value in state.items() if not torch.equal(mine[name], value)]
    assert not different


def int8_weights(reference: GraphModule) -> int:
    """How many quantized weights layers read; a weight of a layer called twice counts twice."""
    dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default
    found = reference.graph.find_nodes(op="call_function", target=dequantize)
    return sum(len(node.users) for node in found)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_reference_computes_what_training_saw(
    training_backend: Any, *, is_dynamic: bool, strict: bool
) -> None:
    model, backend = Network(), training_backend(is_dynamic=is_dynamic)
    trainable = prepare_qat(model, X, backend, strict=strict)

    losses = train(trainable, sgd(trainable), 8)

    assert losses[-1] < losses[0]
    assert all(parameter.grad is not None for parameter in trainable.parameters())
    trainable.eval()
    reference = convert(trainable)
    with torch.no_grad():
        assert sqnr_db(reference(X), trainable(X)) > 100
    post_training = quantize(model, X, backend, [X], strict=strict)
    assert int8_weights(reference) == int8_weights(post_training) == 5
    assert {*dict(reference.named_parameters())} == {*dict(post_training.named_parameters())}
    assert {*dict(reference.named_buffers())} == {*dict(post_training.named_buffers())}
    [own] = reference.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    assert own.args[5] is False


def test_without_rounding_it_trains_as_the_float_model_does(training_backend: Any) -> None:
    model = Network()
    trainable = prepare_qat(model, X, training_backend()).apply(disable_fake_quant)
    trainable.get_submodule("dropout").p = model.dropout.p = 0.0  # type: ignore[assignment]

    train(trainable, sgd(trainable))
    train(model, sgd(model))

    state = trainable.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(trainable.eval()(X), model.eval()(X), rtol=1e-3, atol=1e-5)


def test_the_model_is_never_changed(training_backend: Any) -> None:
    model = Network()
    model.conv.weight.requires_grad_(False)
    state = copied_state(model)

    trainable = prepare_qat(model, X, training_backend())
    train(trainable, sgd(trainable))
    convert(trainable)

    assert_same_state(model, state)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    # What was not to be trained is not.
    assert torch.equal(trainable.get_parameter("conv.weight"), model.conv.weight)
    assert not trainable.get_parameter("conv.weight").requires_grad


def test_random_numbers_stay_the_callers(training_backend: Any) -> None:
    model = Network()
    before = torch.random.get_rng_state()

    prepare_qat(model, X, training_backend())

    assert torch.equal(torch.random.get_rng_state(), before)


def test_state_is_saved_and_loaded_in_the_middle(training_backend: Any, tmp_path: Any) -> None:
    model = Network()
    trainable = prepare_qat(model, X, training_backend())
    optimizer = torch.optim.Adam(trainable.parameters(), lr=0.01)
    train(trainable, optimizer)
    trainable.eval()(X)  # an evaluation in between
    saved = {"module": trainable.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "middle.pt")

    resumed = prepare_qat(model, X, training_backend())
    resumed_optimizer = torch.optim.Adam(resumed.parameters(), lr=0.01)
    loaded = torch.load(tmp_path / "middle.pt")
    resumed.load_state_dict(loaded["module"])
    resumed_optimizer.load_state_dict(loaded["optimizer"])

    for module, its_optimizer in ((trainable.train(), optimizer), (resumed, resumed_optimizer)):
        torch.manual_seed(7)  # dropout
        train(module, its_optimizer)
    assert_same_state(resumed, copied_state(trainable))
    assert torch.equal(convert(resumed)(X), convert(trainable)(X))


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_evaluating_changes_nothing(training_backend: Any, *, is_dynamic: bool) -> None:
    trainable = prepare_qat(Network(), X, training_backend(is_dynamic=is_dynamic))
    train(trainable, sgd(trainable))

    assert trainable.eval() is trainable
    first = trainable(X)
    state = copied_state(trainable)
    if not is_dynamic:  # whose fake quantization keeps the scale of the last call
        trainable(10 * X)
        assert_same_state(trainable, state)

    assert torch.equal(trainable(X), first)  # no dropout, no statistics of the batch


def test_modes_are_those_of_the_modules(training_backend: Any) -> None:
    trainable = prepare_qat(Network(), X, training_backend())
    assert trainable.training
    trainable(X)
    mean = trainable.get_buffer("norm.running_mean").clone()

    assert not torch.equal(trainable(X), trainable(X))  # dropout
    assert not torch.equal(trainable.get_buffer("norm.running_mean"), mean)
    trainable.eval()
    mean = trainable.get_buffer("norm.running_mean").clone()
    assert torch.equal(trainable(X), trainable(X))
    assert torch.equal(trainable.get_buffer("norm.running_mean"), mean)
    trainable.train()
    assert not torch.equal(trainable(X), trainable(X))


def test_batch_norm_statistics_freeze_at_a_step(training_backend: Any) -> None:
    trainable = prepare_qat(Network(), X, training_backend())
    optimizer = sgd(trainable)
    train(trainable, optimizer)
    freeze_batch_norm_statistics(trainable)
    names = [name for name, _ in trainable.named_buffers() if ".running_" in name]
    before = copied_state(trainable)

    train(trainable.eval().train(), optimizer)

    after = trainable.state_dict()
    assert len(names) == 8
    assert all(torch.equal(before[name], after[name]) for name in names)
    assert not torch.equal(before["norm.weight"], after["norm.weight"])  # it goes on learning
    resumed = prepare_qat(Network(), X, training_backend())
    resumed.load_state_dict(after)
    resumed(X)
    assert torch.equal(resumed.get_buffer("norm.running_mean"), after["norm.running_mean"])


def test_ranges_freeze_at_a_step(training_backend: Any) -> None:
    trainable = prepare_qat(Network(), X, training_backend())
    optimizer = sgd(trainable)
    train(trainable, optimizer)
    freeze_ranges(trainable)
    names = [name for name in trainable.state_dict() if name.endswith((".min_val", ".max_val"))]
    before = copied_state(trainable)

    train(trainable.eval().train(), optimizer)

    after = trainable.state_dict()
    assert len(names) >= 16
    assert all(torch.equal(before[name], after[name]) for name in names)
    assert not torch.equal(before["conv.weight"], after["conv.weight"])
    resumed = prepare_qat(Network(), X, training_backend())
    resumed.load_state_dict(after)
    resumed(10 * X)
    assert all(torch.equal(resumed.state_dict()[name], after[name]) for name in names)


def test_torchaos_own_switches_work(training_backend: Any) -> None:
    trainable = prepare_qat(nn.Linear(4, 2), torch.randn(8, 4), training_backend())
    trainable(torch.randn(8, 4))
    trainable.apply(disable_observer)
    state = copied_state(trainable)

    trainable(100 * torch.randn(8, 4))

    assert_same_state(trainable, state)


def test_freezing_a_dynamic_module_leaves_its_measuring(training_backend: Any) -> None:
    x = torch.randn(8, 4)
    trainable = prepare_qat(nn.Linear(4, 2), x, training_backend(is_dynamic=True))
    trainable(x)
    freeze_ranges(trainable)

    torch.testing.assert_close(
        trainable(100 * x) - trainable(0 * x), 100 * (trainable(x) - trainable(0 * x))
    )


def test_training_goes_on_after_converting(training_backend: Any) -> None:
    trainable = prepare_qat(Network(), X, training_backend())
    optimizer = sgd(trainable)
    train(trainable, optimizer)
    state = copied_state(trainable)

    reference = convert(trainable)

    assert_same_state(trainable, state)
    assert trainable.training
    wanted = reference(X)
    train(trainable, optimizer)
    assert torch.equal(reference(X), wanted)
    assert not torch.equal(convert(trainable)(X), wanted)
    assert not any(parameter.requires_grad for parameter in reference.parameters())


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's, of copying
def test_a_copy_is_trained_apart(training_backend: Any) -> None:
    trainable = prepare_qat(Network(), X, training_backend())
    train(trainable, sgd(trainable))
    state = copied_state(trainable)
    copied = copy.deepcopy(trainable)

    train(copied, sgd(copied))
    copied.eval()

    assert_same_state(trainable, state)
    assert trainable.training
    assert sqnr_db(convert(copied)(X), copied(X)) > 100


@pytest.mark.parametrize("batch", [1, 5])
def test_a_dynamic_batch(training_backend: Any, batch: int) -> None:
    shapes = ({0: torch.export.Dim.AUTO},)
    trainable = prepare_qat(Network(), X, training_backend(), dynamic_shapes=shapes)
    train(trainable, sgd(trainable))
    trainable.eval()

    reference = convert(trainable)

    assert sqnr_db(reference(X[:batch]), trainable(X[:batch])) > 100


def test_a_smaller_last_batch_says_what_to_do(training_backend: Any) -> None:
    trainable = prepare_qat(Network(), X, training_backend())
    with pytest.raises(InputError, match=r"drop_last=True.*dynamic_shapes"):
        trainable(X[:5])


def test_a_reference_from_training_is_saved_like_any(training_backend: Any, tmp_path: Any) -> None:
    trainable = prepare_qat(Network(), X, training_backend())
    train(trainable, sgd(trainable))
    reference = convert(trainable)

    save(reference, tmp_path / "model.pt2")

    info = reference_info(load(tmp_path / "model.pt2"))
    assert info.targets[0].options["is_qat"] is True
    assert info.inputs[0].shape == (16, 2, 8, 8)
    assert torch.equal(load(tmp_path / "model.pt2")(X), reference(X))


def test_a_module_that_never_ran_has_no_ranges(training_backend: Any) -> None:
    trainable = prepare_qat(Network(), X, training_backend())
    with pytest.raises(CalibrationError, match="has not run yet"):
        convert(trainable)
    with pytest.raises(TrainingUnsupportedError, match="has not run yet"):
        freeze_ranges(trainable)
    trainable.eval()(X)  # measures what there is nothing of yet
    assert sqnr_db(convert(trainable)(X), trainable(X)) > 100


@pytest.mark.parametrize("freeze", [freeze_ranges, freeze_batch_norm_statistics])
def test_freezing_wants_a_module_for_training(freeze: Any) -> None:
    with pytest.raises(TrainingUnsupportedError, match=r"prepare_qat\(\), got Linear"):
        freeze(nn.Linear(4, 2))


def test_quantize_does_not_train(training_backend: Any) -> None:
    with pytest.raises(TrainingUnsupportedError, match=r"prepare_qat\(\)"):
        quantize(nn.Linear(4, 2), torch.randn(3, 4), training_backend(is_qat=True))


def test_a_backend_whose_quantizer_ignores_the_option(linear_backend: Any) -> None:
    with pytest.raises(TrainingUnsupportedError, match="inserts HistogramObserver"):
        prepare_qat(nn.Linear(4, 2), torch.randn(3, 4), linear_backend())
