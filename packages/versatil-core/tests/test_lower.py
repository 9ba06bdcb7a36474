"""lower() makes a graph of int8 operators and leaves the reference alone."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch.fx import GraphModule

from versatil_core import LoweringError, UnsupportedHostError, lower, quantize, sqnr_db
from versatil_core.lower import is_lowered, lowered_copy
from versatil_passes import LoweringRecord

Backend = Callable[..., Any]


class Pair(torch.nn.Module):
    """Two int8 layers, and a convolution that the backend of these tests leaves float."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 16)
        self.conv = torch.nn.Conv1d(4, 4, 1)
        self.second = torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, *, gain: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.first(x)) * gain
        return {"hidden": hidden, "scores": self.second(self.conv(hidden))}


def named_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(2, 4, 16, generator=generator), "gain": torch.tensor(1.5)}


def pair_reference(backend: Any) -> GraphModule:
    return quantize(Pair(), named_inputs(), backend, calibration=[named_inputs()])


def targets(module: GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_layers_become_int8_operators(linear_backend: Backend, *, is_dynamic: bool) -> None:
    backend = linear_backend(is_dynamic=is_dynamic)
    reference = pair_reference(backend)

    lowered = lower(reference, backend)

    kernel = f"onednn.qlinear_pointwise.{'tensor' if is_dynamic else 'default'}"
    assert targets(lowered).count(kernel) == 2
    assert not any("linear.default" in target for target in targets(lowered))
    assert not any("dequantize_per_channel" in target for target in targets(lowered))
    assert "aten.conv1d.default" in targets(lowered)


def test_results_and_the_call_are_those_of_the_reference(linear_backend: Backend) -> None:
    backend = linear_backend()
    reference = pair_reference(backend)

    got, want = lower(reference, backend)(**named_inputs()), reference(**named_inputs())

    assert list(got) == ["hidden", "scores"]
    for name in want:
        assert sqnr_db(got[name], want[name]) > 60


def test_the_reference_is_not_changed(linear_backend: Backend) -> None:
    backend = linear_backend()
    reference = pair_reference(backend)

    def snapshot() -> Any:
        nodes = [
            (node.name, node.format_node(), sorted(node.meta)) for node in reference.graph.nodes
        ]
        state = {
            name: (value.data_ptr(), value.clone())
            for name, value in reference.state_dict().items()
        }
        return nodes, reference.code, sorted(reference.meta), state

    *before, state_before = snapshot()
    lower(reference, backend)
    *after, state_after = snapshot()

    assert after == before
    assert state_after.keys() == state_before.keys()
    for name, (address, value) in state_before.items():
        assert state_after[name][0] == address
        assert torch.equal(state_after[name][1], value)


def test_weights_are_shared_until_they_are_packed(linear_backend: Backend) -> None:
    backend = linear_backend()
    reference = pair_reference(backend)
    shared = {value.data_ptr() for value in reference.state_dict().values()}

    copied, _ = lowered_copy(reference, backend.lowering_rules)
    lowered = lower(reference, backend)

    assert {value.data_ptr() for value in copied.state_dict().values()} <= shared
    # Packed weights have a layout of their own, without an address.
    kept = [value for value in lowered.buffers() if value.layout is torch.strided]
    parameters = {value.data_ptr() for value in lowered.parameters()}
    assert parameters
    assert parameters <= shared
    assert not any(value.dtype is torch.int8 for value in kept)


def test_the_record_says_what_was_lowered(linear_backend: Backend) -> None:
    backend = linear_backend()

    lowered = lower(pair_reference(backend), backend)

    record = lowered.meta["versatil_lowering"]
    assert isinstance(record, LoweringRecord)
    assert [op.module_path for op in record.lowered] == ["first", "second"]
    assert [op.module_path for op in record.declined] == ["conv"]
    assert is_lowered(lowered)
    assert not is_lowered(pair_reference(backend))


def test_nothing_global_changes(linear_backend: Backend) -> None:
    backend = linear_backend()
    reference = pair_reference(backend)
    before = repr(inductor_config.get_config_copy()), dict(os.environ)

    lower(reference, backend)

    assert (repr(inductor_config.get_config_copy()), dict(os.environ)) == before


@pytest.mark.parametrize("machine", ["riscv64", ""])
def test_a_machine_without_the_kernels(
    linear_backend: Backend, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    backend = linear_backend()
    reference = pair_reference(backend)
    monkeypatch.setattr("platform.machine", lambda: machine)

    with pytest.raises(UnsupportedHostError, match="save the reference") as error:
        lower(reference, backend)

    assert error.value.backend == "test_linear"
    assert error.value.machine == machine
    assert error.value.machine_types == backend.lowering_rules.machine_types


def test_machine_names_are_compared_in_lower_case(
    linear_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows says AMD64."""
    backend = linear_backend()
    reference = pair_reference(backend)
    monkeypatch.setattr("platform.machine", lambda: "AMD64")

    assert is_lowered(lower(reference, backend))


def test_a_float_model_is_no_reference(linear_backend: Backend) -> None:
    with pytest.raises(LoweringError, match="not a Pair"):
        lower(Pair(), linear_backend())  # type: ignore[arg-type]


def test_lowering_twice_is_refused(linear_backend: Backend) -> None:
    """It would find nothing to lower, and say so of a model that is all int8."""
    backend = linear_backend()
    lowered = lower(pair_reference(backend), backend)

    with pytest.raises(LoweringError, match="lowered already"):
        lower(lowered, backend)


def test_packed_weights_are_no_state(linear_backend: Any) -> None:
    """They are opaque, and made anew from the reference wherever it is lowered."""
    x = torch.randn(2, 8)
    backend = linear_backend()
    reference = quantize(torch.nn.Linear(8, 4), x, backend, calibration=[x])

    state = lower(reference, backend).state_dict()

    assert not any(value.is_mkldnn for value in state.values())
    assert all(name in reference.state_dict() for name in state)
