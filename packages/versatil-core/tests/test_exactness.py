"""The judge passes what is exact, and names what is not, by how much, whatever was tampered with."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from versatil_core import (
    ExactnessReport,
    InexactError,
    OpExactness,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    lower,
    quantize,
)
from versatil_passes import LoweringRules, VersatilError, onednn_kernels

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)

Backend = Callable[..., Any]
QLINEAR = torch.ops.onednn.qlinear_pointwise.default


class Chain(torch.nn.Module):
    """int8 -> int8 (with relu) -> float (with relu), and behind it an op that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 32)
        self.third = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.third(torch.relu(self.second(self.first(x)))))
        return y, torch.tanh(y)


def narrow_range_inputs() -> torch.Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def rules(linear_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> LoweringRules:
    """Return the rules that the backend of these tests has: relu, clamps and int8 outputs fuse."""
    fused = frozenset({"relu", "hardtanh"})
    made = dataclasses.replace(linear_backend().lowering_rules, post_ops={"linear": fused})
    monkeypatch.setattr(linear_backend, "lowering_rules", made)
    return made


@pytest.fixture
def backend(linear_backend: Backend, rules: LoweringRules) -> Any:
    """Return a static backend with ``rules``."""
    made = linear_backend()
    assert made.lowering_rules is rules
    return made


@pytest.fixture
def reference(backend: Any) -> GraphModule:
    """Return a reference whose int8 layers have a reduced range."""
    return quantize(Chain(), narrow_range_inputs(), backend, [narrow_range_inputs()])


@pytest.fixture
def lowered(reference: GraphModule, backend: Any) -> GraphModule:
    """Return the lowered reference, to be tampered with."""
    made = lower(reference, backend)
    assert [node.args[6:] for node in kernels(made)] != []
    return made


def kernels(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.target is QLINEAR]


def set_arg(module: GraphModule, kernel: int, position: int, value: Any) -> None:
    """Change one argument of one kernel: 1 x_scale, 6 bias, 7 output_scale, 10 post op, 11 its arguments."""
    kernels(module)[kernel].update_arg(position, value)
    module.recompile()


def judge(reference: GraphModule, candidate: torch.nn.Module, scale: float = 1) -> ExactnessReport:
    return check_exactness(reference, candidate, (scale * narrow_range_inputs(),))


@pytest.mark.parametrize("scale", [1, 4])
def test_a_lowered_graph_is_exact(reference: GraphModule, lowered: GraphModule, scale: int) -> None:
    """Also beyond the calibrated range, where int8 outputs are clamped to fewer bits than they have."""
    report = judge(reference, lowered, scale)

    report.raise_if_inexact()
    assert report.is_exact
    linears = [op for op in report.ops if "linear" in op.op]
    assert [op.op for op in linears] == [
        "linear -> uint8",
        "linear + relu -> uint8",
        "linear + relu -> float32",
    ]
    assert [op.dtype for op in linears] == [torch.uint8, torch.uint8, torch.float32]
    assert linears[2].sqnr_db is not None
    assert linears[2].sqnr_db > 100
    assert report.end_to_end_db > 30
    assert report.loss_db is None
    assert f"{len(report.ops)} of {len(report.ops)} ops exact" in str(report)
    assert "inputs untouched" in str(report)


def test_a_dynamic_lowered_graph_is_exact(linear_backend: Backend, rules: LoweringRules) -> None:
    backend = linear_backend(is_dynamic=True)
    assert backend.lowering_rules is rules
    reference = quantize(Chain(), narrow_range_inputs(), backend)

    report = judge(reference, lower(reference, backend))

    assert report.is_exact
    assert [op.dtype for op in report.ops if "linear" in op.op] == [torch.float32] * 3
    assert report.end_to_end_db > 60


def test_the_distance_to_float_is_compared(reference: GraphModule, lowered: GraphModule) -> None:
    inputs = (narrow_range_inputs(),)

    good = check_exactness(reference, lowered, inputs, float_model=Chain())

    assert good.loss_db is not None
    assert abs(good.loss_db) < 0.3
    assert good.is_exact
    assert "farther from float" in str(good)
    assert not dataclasses.replace(good, loss_db=0.31).is_exact
    assert dataclasses.replace(good, loss_db=-1.0).is_exact


def tampered_weight(module: GraphModule) -> None:
    weight = torch.randint(-128, 127, (32, 32), dtype=torch.int8)
    name = str(kernels(module)[1].args[3])
    setattr(module, name, torch.ops.onednn.qlinear_prepack(weight, None))


def tampered_bias(module: GraphModule) -> None:
    set_arg(module, 2, 6, None)


def tampered_scale(module: GraphModule) -> None:
    scale = kernels(module)[2].args[1]
    assert isinstance(scale, float)
    set_arg(module, 2, 1, 1.01 * scale)


def tampered_weight_scales(module: GraphModule) -> None:
    """A constant that the reference has, too, under the same name."""
    scale = kernels(module)[2].args[4]
    assert isinstance(scale, Node)
    folder, _, name = str(scale.target).rpartition(".")
    owner = module.get_submodule(folder)
    setattr(owner, name, 1.1 * getattr(owner, name))


def tampered_output_scale(module: GraphModule) -> None:
    scale = kernels(module)[0].args[7]
    assert isinstance(scale, float)
    set_arg(module, 0, 7, 1.2 * scale)


def dropped_clamp(module: GraphModule) -> None:
    assert kernels(module)[0].args[10] == "hardtanh"
    set_arg(module, 0, 11, [])
    set_arg(module, 0, 10, "none")


def dropped_relu(module: GraphModule) -> None:
    assert kernels(module)[2].args[10] == "relu"
    set_arg(module, 2, 10, "none")


@pytest.mark.parametrize(
    ("tamper", "position"),
    [
        (tampered_weight, 1),
        (tampered_bias, 2),
        (tampered_scale, 2),
        (tampered_weight_scales, 2),
        (tampered_output_scale, 0),
        (dropped_clamp, 0),
        (dropped_relu, 2),
    ],
)
def test_tampering_is_found_and_named(
    reference: GraphModule,
    lowered: GraphModule,
    tamper: Callable[[GraphModule], None],
    position: int,
) -> None:
    """Only the op itself is blamed, and not those that read its result."""
    tamper(lowered)

    report = judge(reference, lowered, scale=4)

    assert not report.is_exact
    [op] = report.disagreements
    lowered_names = [op.node for op in report.ops if "linear" in op.op]
    assert op.node == lowered_names[position]
    if op.sqnr_db is None:
        assert (op.max_steps or 0) > 1
        assert f"up to {op.max_steps} steps" in str(report)
    else:
        assert op.sqnr_db < 60
        assert f"{op.sqnr_db:.1f} dB" in str(report)
    with pytest.raises(InexactError, match=f"1 of {len(report.ops)} ops are not exact") as error:
        report.raise_if_inexact()
    assert error.value.report is report
    assert isinstance(error.value, (VersatilError, AssertionError))
    assert op.node in str(error.value)


def test_dropping_the_clamp_shows_only_beyond_the_calibrated_range(
    reference: GraphModule, lowered: GraphModule
) -> None:
    """Case 30: why the judge has to be fed such inputs."""
    dropped_clamp(lowered)

    assert judge(reference, lowered, scale=0.5).is_exact
    assert not judge(reference, lowered, scale=4).is_exact


def insert_after(module: GraphModule, name: str, operator: Any, *others: Any) -> None:
    [node] = [node for node in module.graph.nodes if name in (node.name, node.meta.get("replaces"))]
    readers = list(node.users)
    with module.graph.inserting_after(node):
        inserted = module.graph.call_function(operator, (node, *others))
    for reader in readers:
        reader.replace_input_with(node, inserted)
    module.recompile()


def test_an_op_that_the_reference_does_not_have(
    reference: GraphModule, lowered: GraphModule
) -> None:
    insert_after(lowered, "relu_1", torch.ops.aten.mul.Tensor, 1.01)

    report = judge(reference, lowered)

    assert [op.node for op in report.disagreements] == ["tanh", "output"]


def test_an_op_of_the_reference_that_became_another(
    reference: GraphModule, lowered: GraphModule
) -> None:
    [tanh] = lowered.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    tanh.target = torch.ops.aten.sigmoid.default
    lowered.recompile()

    report = judge(reference, lowered)

    assert [op.node for op in report.disagreements] == ["tanh"]


def test_results_in_another_order(reference: GraphModule, lowered: GraphModule) -> None:
    output = lowered.graph.output_node()
    [results] = output.args
    assert isinstance(results, Sequence)
    output.args = (tuple(reversed(results)),)
    lowered.recompile()

    report = judge(reference, lowered)

    assert not report.is_exact
    assert {op.node for op in report.disagreements} == {"output"}


def test_a_result_of_another_shape_or_dtype(reference: GraphModule, lowered: GraphModule) -> None:
    insert_after(lowered, "relu_1", torch.ops.aten.unsqueeze.default, 0)

    report = judge(reference, lowered)

    tanh, *_ = report.disagreements
    assert tanh.sqnr_db == -math.inf
    assert "(1, 64, 4)" in tanh.op


def test_overwritten_inputs_are_reported(reference: GraphModule, lowered: GraphModule) -> None:
    """Case 27: the results may be right all the same."""
    [x] = lowered.graph.find_nodes(op="placeholder")
    with lowered.graph.inserting_before(lowered.graph.output_node()):
        lowered.graph.call_function(torch.ops.aten.add_.Tensor, (x, 1.0))
    lowered.recompile()

    report = judge(reference, lowered)

    assert not report.disagreements
    assert not report.are_inputs_untouched
    assert not report.is_exact
    assert "INPUTS WERE OVERWRITTEN" in str(report)
    with pytest.raises(InexactError, match="OVERWRITTEN"):
        report.raise_if_inexact()


def test_a_compiled_model(
    reference: GraphModule, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact; and not, once the pass chain makes kernels with another output scale."""
    good = judge(reference, compile(reference, backend), scale=4)

    good.raise_if_inexact()
    linears = [op for op in good.ops if op.op.startswith("linear")]
    assert len(linears) == 3
    assert {op.op for op in good.ops} > {op.op for op in linears}  # and what is between them

    bind = onednn_kernels.bind

    def sabotaged(call: Any, *args: Any, **options: Any) -> Any:
        if call.has_int8_output:
            call = dataclasses.replace(call, output_scale=1.2 * call.output_scale)
        return bind(call, *args, **options)

    monkeypatch.setattr(onednn_kernels, "bind", sabotaged)
    bad = judge(reference, compile(reference, backend), scale=4)

    assert not bad.is_exact
    assert [op.node for op in bad.disagreements] == [op.node for op in linears[:2]]
    assert all((op.max_steps or 0) > 1 for op in bad.disagreements)


def test_writing_through_a_view_is_seen(linear_backend: Backend) -> None:
    """What the reference reads behind it is not what the op in front of it returned."""

    class Writer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sin(x)
            y[0].add_(1.0)
            return self.linear(y)

    backend, x = linear_backend(), narrow_range_inputs()
    reference = quantize(Writer(), x, backend, [x])
    assert any("add_" in str(node.target) for node in reference.graph.nodes)

    judge(reference, lower(reference, backend)).raise_if_inexact()


def test_neither_lowered_nor_compiled(reference: GraphModule) -> None:
    with pytest.raises(TypeError, match=r"lower\(\) or compile\(\), not be a Chain"):
        check_exactness(reference, Chain(), (narrow_range_inputs(),))


def op_exactness(**values: Any) -> OpExactness:
    defaults: dict[str, Any] = {"sqnr_db": None, "max_steps": None, "different_share": None}
    return OpExactness("node", "linear", torch.float32, **{**defaults, **values})


@pytest.mark.parametrize(
    ("op", "is_exact"),
    [
        (op_exactness(sqnr_db=60.0), True),
        (op_exactness(sqnr_db=59.9), False),
        (op_exactness(sqnr_db=math.inf), True),
        (op_exactness(sqnr_db=-math.inf), False),
        (op_exactness(max_steps=0, different_share=0.0), True),
        (op_exactness(max_steps=1, different_share=0.001), True),
        (op_exactness(max_steps=1, different_share=0.0011), False),
        (op_exactness(max_steps=2, different_share=0.0001), False),
    ],
)
def test_limits(op: OpExactness, *, is_exact: bool) -> None:
    assert op.is_exact is is_exact
    assert ExactnessReport((op,), 100.0, are_inputs_untouched=True, loss_db=None).is_exact is (
        is_exact
    )
