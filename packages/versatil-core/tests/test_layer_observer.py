"""An observer of a weight that asks for it is shown what its layer is called with, for every batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torchao.quantization.pt2e import PerChannelMinMaxObserver

from versatil_core import quantize
from versatil_core.calibration import calibrate
from versatil_core.export import export
from versatil_core.prepare import prepare

Backend = Callable[..., Any]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
aten = torch.ops.aten


class Model(torch.nn.Module):
    """Two layers; the second is called twice. Nested inputs, a constant, and a buffer that calls write to."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 6)
        self.second = torch.nn.Linear(6, 6, bias=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(
        self, x: torch.Tensor, more: dict[str, torch.Tensor], *, gain: float, y: torch.Tensor
    ) -> torch.Tensor:
        self.count.add_(1)
        hidden = self.second(torch.relu(self.first(x))) * gain + more["shift"] * self.count
        result: torch.Tensor = self.second(hidden) + y
        return result


def batch(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(3, 4, generator=generator),
        "more": {"shift": torch.randn(6, generator=generator)},
        "gain": 2.0,
        "y": torch.randn(3, 6, generator=generator),
    }


BATCHES = [batch(1), batch(2)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Make each weight observer a layer observer; this is what they are called with."""
    seen: list[Call] = []

    def observe_layer(
        observer: PerChannelMinMaxObserver,
        layer: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        assert observer.min_val.numel(), "the weight's observer runs before its layer"
        copied = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
        seen.append((str(layer), copied, kwargs))

    monkeypatch.setattr(PerChannelMinMaxObserver, "observe_layer", observe_layer, raising=False)
    return seen


def prepared_model(backend: Any) -> GraphModule:
    return prepare(export(Model(), batch(0)), backend)


def expected(first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Activation and weight of each layer's calls in float, for the batches; the counter starts at ``first``."""
    model = Model()
    model.count.fill_(first)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in (model.first, model.second):
        layer.register_forward_pre_hook(lambda layer, args: seen.append((args[0], layer.weight)))
    with torch.no_grad():
        for values in BATCHES:
            model(**values)
    return seen


def test_every_call_of_every_layer_is_shown(linear_backend: Backend, calls: list[Call]) -> None:
    prepared = prepared_model(linear_backend())

    assert calibrate(prepared, BATCHES, batch(0)) == 2

    assert [layer for layer, _, _ in calls] == ["aten.linear.default"] * 6
    assert [len(args) for _, args, _ in calls] == [3, 2, 2, 3, 2, 2]
    assert all(kwargs == {} for _, _, kwargs in calls)
    for (_, args, _), (activation, weight) in zip(calls, expected(0), strict=True):
        assert torch.equal(args[0], activation)
        assert torch.equal(args[1], weight)


def test_inputs_by_position(linear_backend: Backend, calls: list[Call]) -> None:
    class Ordered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, None]) -> torch.Tensor:
            result: torch.Tensor = self.linear(x - 2 * pair[0])
            return result

    model = Ordered()
    batches = [(torch.randn(3, 4), (torch.randn(3, 4), None)) for _ in range(2)]

    quantize(model, batches[0], linear_backend(), batches)

    assert len(calls) == 2
    for (_, args, _), (x, pair) in zip(calls, batches, strict=True):
        assert torch.equal(args[0], x - 2 * pair[0])
        assert torch.equal(args[1], model.linear.weight)


def test_keyword_arguments_of_a_layer_are_shown(linear_backend: Backend, calls: list[Call]) -> None:
    prepared = prepared_model(linear_backend())
    first = next(node for node in prepared.graph.nodes if node.target is aten.linear.default)
    first.args, first.kwargs = first.args[:2], {"bias": first.args[2]}
    prepared.recompile()

    calibrate(prepared, BATCHES, batch(0))

    [bias] = calls[0][2].values()
    assert list(calls[0][2]) == ["bias"]
    assert torch.equal(bias, Model().first.bias)


def test_no_data_no_showing(linear_backend: Backend, calls: list[Call]) -> None:
    """Without calibration data, only the example runs, and that may be all zeros."""
    quantize(Model(), batch(0), linear_backend(is_dynamic=True))
    assert calls == []

    calibrate(prepared_model(linear_backend()), BATCHES, batch(0), observe_layers=False)
    assert calls == []


def test_a_dynamic_backend_shows_the_data_it_gets(
    linear_backend: Backend, calls: list[Call]
) -> None:
    quantize(Model(), batch(0), linear_backend(is_dynamic=True), BATCHES)

    assert len(calls) == 6


def test_showing_changes_nothing(
    linear_backend: Backend, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Whoever looks or not: the observers have seen the same, and buffers are the same."""
    plain = prepared_model(linear_backend())
    calibrate(plain, BATCHES, batch(0))
    calls = request.getfixturevalue("calls")
    watched = prepared_model(linear_backend())
    calibrate(watched, BATCHES, batch(0))
    monkeypatch.undo()

    assert len(calls) == 6
    state = plain.state_dict()
    assert any("min_val" in name for name in state)
    assert watched.state_dict().keys() == state.keys()
    for name, value in watched.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_the_reference_is_the_same(linear_backend: Backend, request: pytest.FixtureRequest) -> None:
    plain = quantize(Model(), batch(0), linear_backend(), BATCHES)
    calls = request.getfixturevalue("calls")
    watched = quantize(Model(), batch(0), linear_backend(), BATCHES)

    assert len(calls) == 6
    assert torch.equal(watched(**batch(3)), plain(**batch(3)))
    assert watched.code == plain.code
