"""One warning for the same layers, where a CPU may saturate, that names them and what to do."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from versatil_core import SaturationWarning, compile, lower, quantize  # noqa: A004 -- the verb
from versatil_core.saturation import (
    SaturationCheck,
    saturation_advice,
    warn_about_saturation,
)
from versatil_passes import (
    Int8Lowering,
    LoweredOp,
    LoweringRecord,
    LoweringRules,
    PassChain,
    SaturatingPairs,
)

Backend = Callable[..., Any]
PAIRS = SaturatingPairs(
    accumulator_max=32767, uncut_features=256, cause="This CPU is old", remedy="Buy another"
)
RULES = LoweringRules(machine_types=("x86_64",), saturating_pairs=PAIRS)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the warnings that this process may have given."""
    monkeypatch.setattr("versatil_core.saturation._warned", set())


def lowered_op(module_path: str, pair_sum: int | None = 129) -> LoweredOp:
    return LoweredOp(
        node=f"node_of_{module_path}",
        module_path=module_path,
        op="linear",
        kernel="onednn.qlinear_pointwise",
        post_ops=(),
        output_dtype=torch.float32,
        input_quant_max=255,
        is_dynamic=False,
        replaces=(),
        pair_sum=pair_sum,
        pair_limit=None if pair_sum is None else 128,
    )


def record_of(*ops: LoweredOp) -> LoweringRecord:
    return LoweringRecord(lowered=ops)


def quantized(backend: Any) -> GraphModule:
    x = torch.randn(2, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.uniform_(0.5, 1)  # type: ignore[operator] # every pair has one sign
    return quantize(model, x, backend, [x])


def test_only_the_layers_that_exceed_the_limit_are_named() -> None:
    record = record_of(lowered_op("wide"), lowered_op("safe", 128), lowered_op("", 254))

    with pytest.warns(SaturationWarning, match="wrong results in wide, node_of_") as caught:
        warn_about_saturation(record, RULES)

    [warning] = caught
    assert "safe" not in str(warning.message)
    assert str(warning.message).endswith(": This CPU is old. Buy another")


def test_a_long_list_is_cut() -> None:
    record = record_of(*[lowered_op(f"layer{number}") for number in range(7)])

    with pytest.warns(SaturationWarning, match="layer4 and 2 more: This CPU"):
        warn_about_saturation(record, RULES)


def test_once_in_a_process_for_the_same_layers() -> None:
    first, second = lowered_op("first"), lowered_op("second")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for ops in ((first,), (second,), (first, second), (first, lowered_op("safe", 1))):
                warn_about_saturation(record_of(*ops), RULES)

    messages = [str(warning.message).partition(":")[0] for warning in caught]
    named = [message.partition("wrong results in ")[2] for message in messages]
    assert named == ["first", "second", "first, second"]


def test_layers_of_another_model_may_have_the_same_names() -> None:
    for pair_sum in (129, 254):
        with pytest.warns(SaturationWarning, match="wrong results in 0: "):
            warn_about_saturation(record_of(lowered_op("0", pair_sum)), RULES)


def test_a_warning_that_was_made_an_error_comes_again() -> None:
    record = record_of(lowered_op("wide"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(SaturationWarning):
                warn_about_saturation(record, RULES)


def test_a_safe_model_does_not_use_the_warning_up() -> None:
    warn_about_saturation(record_of(lowered_op("wide", 128)), RULES)

    with pytest.warns(SaturationWarning, match="wide"):
        warn_about_saturation(record_of(lowered_op("wide")), RULES)


@pytest.mark.filterwarnings("error")
def test_no_warning_on_a_cpu_that_can_take_it() -> None:
    rules = dataclasses.replace(RULES, saturating_pairs=None)

    warn_about_saturation(record_of(lowered_op("wide", None)), rules)


def test_advice_without_a_text_of_the_backend() -> None:
    pairs = SaturatingPairs(accumulator_max=32767, uncut_features=256)
    advice = saturation_advice(dataclasses.replace(RULES, saturating_pairs=pairs))

    assert advice == (
        "the kernels add two products into a value that saturates. "
        "Quantize the model again for this CPU"
    )


@pytest.mark.parametrize("make", [lower, compile])
def test_whoever_makes_kernels_warns(
    linear_backend: Backend, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]
) -> None:
    """Before the first call already, and not for a backend within the limit."""
    rules = dataclasses.replace(linear_backend().lowering_rules, saturating_pairs=PAIRS)
    monkeypatch.setattr(linear_backend, "lowering_rules", rules)
    wide, safe = linear_backend(quant_max=255), linear_backend(quant_max=127)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(quantized(safe), safe)
    with pytest.warns(SaturationWarning, match="wrong results in 0, 2"):
        make(quantized(wide), wide)


def test_the_pass_reads_the_record_of_its_lowering(linear_backend: Backend) -> None:
    backend = linear_backend(quant_max=255)
    lowering = Int8Lowering(dataclasses.replace(backend.lowering_rules, saturating_pairs=PAIRS))
    graph: Graph = quantized(backend).graph

    with pytest.warns(SaturationWarning, match="wrong results in 0, 2"):
        PassChain(lowering, SaturationCheck(lowering))(graph)

    other = SaturationCheck(Int8Lowering(dataclasses.replace(RULES, saturating_pairs=None)))
    assert SaturationCheck(lowering).uuid() != other.uuid()


def test_the_pass_changes_nothing(linear_backend: Backend) -> None:
    graph: Graph = quantized(linear_backend()).graph
    before = str(graph)

    SaturationCheck(Int8Lowering(RULES))(graph)

    assert str(graph) == before
