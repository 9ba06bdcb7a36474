"""One warning in a process, where a CPU may saturate, that names the layers."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from versatil_core import SaturationWarning, compile, lower, quantize  # noqa: A004 -- the verb
from versatil_core.saturation import SaturationCheck, warn_about_saturation
from versatil_passes import Int8Lowering, LoweredOp, LoweringRecord, LoweringRules, PassChain

Backend = Callable[..., Any]
RULES = LoweringRules(machine_types=("x86_64",), safe_input_quant_max=127)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the warning that this process may have given."""
    monkeypatch.setattr("versatil_core.saturation._warned", [])


def lowered_op(module_path: str, input_quant_max: int = 255) -> LoweredOp:
    return LoweredOp(
        node=f"node_of_{module_path}",
        module_path=module_path,
        op="linear",
        kernel="onednn.qlinear_pointwise",
        post_ops=(),
        output_dtype=torch.float32,
        input_quant_max=input_quant_max,
        is_dynamic=False,
        replaces=(),
    )


def record_of(*ops: LoweredOp) -> LoweringRecord:
    return LoweringRecord(lowered=ops)


def quantized(backend: Any) -> GraphModule:
    x = torch.randn(2, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return quantize(model, x, backend, [x])


def test_only_the_layers_that_exceed_the_limit_are_named() -> None:
    record = record_of(lowered_op("wide"), lowered_op("safe", 127), lowered_op("", 128))

    with pytest.warns(SaturationWarning, match="wrong results in wide, node_of_") as caught:
        warn_about_saturation(record, RULES)

    [warning] = caught
    assert "safe" not in str(warning.message)
    assert "reduce_range=True" in str(warning.message)
    assert "for_host()" in str(warning.message)


def test_a_long_list_is_cut() -> None:
    record = record_of(*[lowered_op(f"layer{number}") for number in range(7)])

    with pytest.warns(SaturationWarning, match=r"layer4 and 2 more\. "):
        warn_about_saturation(record, RULES)


def test_once_in_a_process() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("first", "second"):
            warn_about_saturation(record_of(lowered_op(name)), RULES)

    assert [str(warning.message).count("first") for warning in caught] == [1]


def test_a_safe_model_does_not_use_the_warning_up() -> None:
    warn_about_saturation(record_of(lowered_op("safe", 127)), RULES)

    with pytest.warns(SaturationWarning, match="wide"):
        warn_about_saturation(record_of(lowered_op("wide")), RULES)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("limit", [None, 255])
def test_no_warning_on_a_cpu_that_can_take_it(limit: int | None) -> None:
    rules = dataclasses.replace(RULES, safe_input_quant_max=limit)

    warn_about_saturation(record_of(lowered_op("wide")), rules)


@pytest.mark.parametrize("make", [lower, compile])
def test_whoever_makes_kernels_warns(
    linear_backend: Backend, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]
) -> None:
    """Before the first call already, and not for a backend within the limit."""
    rules = dataclasses.replace(linear_backend().lowering_rules, safe_input_quant_max=127)
    monkeypatch.setattr(linear_backend, "lowering_rules", rules)
    wide, safe = linear_backend(quant_max=255), linear_backend(quant_max=127)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(quantized(safe), safe)
    with pytest.warns(SaturationWarning, match="wrong results in 0, 2"):
        make(quantized(wide), wide)


def test_the_pass_reads_the_record_of_its_lowering(linear_backend: Backend) -> None:
    backend = linear_backend(quant_max=255)
    lowering = Int8Lowering(dataclasses.replace(backend.lowering_rules, safe_input_quant_max=127))
    graph: Graph = quantized(backend).graph

    with pytest.warns(SaturationWarning, match="wrong results in 0, 2"):
        PassChain(lowering, SaturationCheck(lowering))(graph)

    assert SaturationCheck(lowering).uuid()


def test_the_pass_changes_nothing(linear_backend: Backend) -> None:
    graph: Graph = quantized(linear_backend()).graph
    before = str(graph)

    SaturationCheck(Int8Lowering(RULES))(graph)

    assert str(graph) == before
