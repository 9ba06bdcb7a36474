"""compile() makes int8 kernels whatever triggers the compilation, and changes nothing global.

Every test compiles the same small model, so that the C++ of its kernels is built once.
"""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.graph import GraphLowering
from torch.fx import Graph, GraphModule

from versatil_core import (
    CompiledModel,
    LoweringError,
    UnsupportedHostError,
    compile,  # noqa: A004 -- the verb
    dynamo_backend,
    lower,
    quantize,
    sqnr_db,
)
from versatil_passes import PassError

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)

Backend = Callable[..., Any]
INT8 = "onednn::qlinear_pointwise"
HAS_LISTS = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 13)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def inputs(size: int = 4) -> torch.Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def backend(linear_backend: Backend) -> Any:
    """Return a static backend."""
    return linear_backend()


@pytest.fixture
def reference(backend: Any) -> GraphModule:
    """Return a reference for batches of 4."""
    return quantize(model(), inputs(), backend, [inputs()])


@pytest.fixture
def any_batch(backend: Any) -> GraphModule:
    """Return a reference for batches of 1 to 64, exported with an example of 1."""
    batch = torch.export.Dim("batch", min=1, max=64)
    return quantize(model(), inputs(1), backend, [inputs()], dynamic_shapes=({0: batch},))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Keep compilations of one test out of the limits of the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the code of each compilation."""
    generated: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(generated.append))
    return generated


def global_state() -> tuple[str, dict[str, str], bool, int]:
    # Any torch.compile leaves the places of its caches, and an address, in variables of torch's own.
    variables = {name: os.environ[name] for name in os.environ if "TORCHINDUCTOR" not in name}
    return (
        repr(inductor_config.get_config_copy()),
        variables,
        torch.is_grad_enabled(),
        torch.get_num_threads(),
    )


def operators_run(call: Callable[[], Any]) -> set[str]:
    """Names of the operators that a call runs, compiled or not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


def assert_runs_int8(
    run: Callable[[torch.Tensor], Any], reference: GraphModule, x: torch.Tensor
) -> None:
    """Right, on int8 kernels, and on no float one."""
    with torch.no_grad():
        assert sqnr_db(run(x).detach(), reference(x)) > 60
    ran = operators_run(lambda: run(x))  # compiling, at the first call, runs operators too
    assert INT8 in ran
    assert not ran & {"aten::linear", "aten::addmm", "aten::mm", "mkldnn::_linear_pointwise"}


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_gradients_on_and_nothing_global_changes(
    linear_backend: Backend, codes: list[str], *, is_dynamic: bool
) -> None:
    """Case 03: freezing is off, gradients are on at the first call, and the input even wants one."""
    backend = linear_backend(is_dynamic=is_dynamic)
    reference = quantize(model(), inputs(), backend, [inputs()])
    x = inputs().requires_grad_()
    compiled = compile(reference, backend)
    before = global_state()
    assert inductor_config.freezing is False
    assert torch.is_grad_enabled()

    result = compiled(x)

    assert global_state() == before
    assert len(codes) == 1
    assert "qlinear_pointwise" in codes[0]
    assert not result.requires_grad
    assert torch.equal(x, inputs())
    assert_runs_int8(compiled, reference, x)
    assert len(codes) == 1  # the second call compiled nothing


@pytest.mark.parametrize("trigger", ["threads", "reset", "moved_to_eval", "inference_mode"])
def test_recompiling_stays_int8(
    reference: GraphModule, backend: Any, codes: list[str], trigger: str
) -> None:
    from torchao.quantization.pt2e import move_exported_model_to_eval

    compiled = compile(reference, backend)
    compiled(inputs())
    assert len(codes) == 1
    mode: AbstractContextManager[Any] = torch.enable_grad()
    threads = torch.get_num_threads()
    try:
        if trigger == "threads":
            torch.set_num_threads(2 if threads == 1 else 1)
        elif trigger == "reset":
            torch._dynamo.reset()
        elif trigger == "moved_to_eval":
            dropout = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
            move_exported_model_to_eval(
                torch.export.export(dropout.train(), (torch.randn(2, 4),)).module()
            )
        else:
            mode = torch.inference_mode()
        with mode:
            compiled(inputs())
            assert_runs_int8(compiled, reference, inputs())
    finally:
        torch.set_num_threads(threads)

    assert all("qlinear_pointwise" in code for code in codes)
    # torchao 0.15 forgets no compiled code when it moves a model.
    assert len(codes) == 2 or trigger == "moved_to_eval"
    assert all("qlinear_pointwise" in code for code in codes)


def test_one_compilation_for_every_batch_size(
    any_batch: GraphModule, backend: Any, codes: list[str]
) -> None:
    """Case 15: also from an example of batch 1, and for batches of 1."""
    compiled = compile(any_batch, backend)

    for size in (4, 9, 64):
        assert compiled(inputs(size)).shape == (size, 4)
        assert_runs_int8(compiled, any_batch, inputs(size))
    assert len(codes) == 1
    # torch makes a kernel of its own for size 1, or not.
    assert_runs_int8(compiled, any_batch, inputs(1))
    assert len(codes) <= 2


def test_static_kernels_for_each_batch_size(
    any_batch: GraphModule, backend: Any, codes: list[str]
) -> None:
    compiled = compile(any_batch, backend, dynamic=False)

    for size in (4, 9):
        assert_runs_int8(compiled, any_batch, inputs(size))

    assert len(codes) == 2


def test_at_the_recompile_limit_the_lowered_graph_runs(
    any_batch: GraphModule, backend: Any, codes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Never silently float; and one model does not use up the limit of another."""
    first, second = (compile(any_batch, backend, dynamic=False) for _ in range(2))
    with torch._dynamo.config.patch(recompile_limit=1):
        first(inputs(4))
        second(inputs(4))
        assert len(codes) == 2
        assert "lowered graph" not in caplog.text

        assert_runs_int8(first, any_batch, inputs(9))

    assert len(codes) == 2
    assert torch.equal(first(inputs(9)), lower(any_batch, backend)(inputs(9)))
    messages = [record for record in caplog.records if "lowered graph" in record.getMessage()]
    assert [record.levelno for record in messages] == [logging.WARNING]  # once


@pytest.mark.parametrize(
    "disabled",
    [
        lambda: torch._dynamo.config.patch(disable=True),  # what TORCHDYNAMO_DISABLE=1 does
        lambda: torch.compiler.set_stance("force_eager"),
    ],
)
def test_without_dynamo_the_lowered_graph_runs(
    reference: GraphModule,
    backend: Any,
    codes: list[str],
    caplog: pytest.LogCaptureFixture,
    disabled: Callable[[], AbstractContextManager[Any]],
) -> None:
    compiled = compile(reference, backend)

    with disabled():
        assert_runs_int8(compiled, reference, inputs())

    assert codes == []
    assert "running the lowered graph" in caplog.text


class Recorder:
    """A user's pass: notes its name, and what it finds."""

    def __init__(self, name: str, seen: list[tuple[str, bool]]) -> None:
        self.name = name
        self.seen = seen

    def __call__(self, graph: Graph) -> None:
        targets = [str(node.target) for node in graph.nodes]
        self.seen.append((self.name, any("linear.default" in target for target in targets)))


@pytest.mark.parametrize(
    "in_list",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(not HAS_LISTS, reason="from torch 2.13 on")),
    ],
)
def test_passes_of_the_user_run_first_and_in_order(
    reference: GraphModule, backend: Any, codes: list[str], *, in_list: bool
) -> None:
    """Case 01: they still find the float layers, and int8 kernels come out all the same."""
    seen: list[tuple[str, bool]] = []
    mine: Any = Recorder("first", seen)
    if in_list:
        mine = [mine, Recorder("second", seen)]

    with inductor_config.patch(pre_grad_custom_pass=mine):
        compile(reference, backend)(inputs())
        assert inductor_config.pre_grad_custom_pass is mine

    assert seen == [("first", True), ("second", True)][: 2 if in_list else 1]
    assert "qlinear_pointwise" in codes[0]


def test_a_failing_pass_is_named_and_everything_is_restored(
    reference: GraphModule, backend: Any
) -> None:
    def broken_pass(graph: Graph) -> None:
        raise KeyError(len(graph.nodes))

    compiled = compile(reference, backend)
    with inductor_config.patch(pre_grad_custom_pass=broken_pass):
        before = global_state()
        with pytest.raises(
            RuntimeError, match=r"PassError: broken_pass failed after \[\]"
        ) as error:
            compiled(inputs())
        assert global_state() == before

    # Dynamo wraps what a backend raises.
    inner = getattr(error.value, "inner_exception", error.value)
    assert isinstance(inner, PassError)
    assert inner.ran_before == ()
    assert_runs_int8(compiled, reference, inputs())  # the next call compiles


def test_two_threads_with_two_backends(linear_backend: Backend, codes: list[str]) -> None:
    backends = {
        name: linear_backend(is_dynamic=name == "dynamic") for name in ("static", "dynamic")
    }
    references = {
        name: quantize(model(), inputs(), backend, [inputs()]) for name, backend in backends.items()
    }
    together = threading.Barrier(2)
    results: dict[str, Any] = {}
    states: dict[str, bool] = {}

    def work(name: str) -> None:
        compiled = compile(references[name], backends[name])
        before = repr(inductor_config.get_config_copy())
        together.wait(60)
        results[name] = compiled(inputs())
        states[name] = repr(inductor_config.get_config_copy()) == before

    before = global_state()
    threads = [threading.Thread(target=work, args=(name,)) for name in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)

    assert global_state() == before
    assert states == {"static": True, "dynamic": True}
    for name, reference in references.items():
        assert sqnr_db(results[name], reference(inputs())) > 60
    assert not torch.equal(results["static"], results["dynamic"])
    assert len(codes) == 2
    assert all("qlinear_pointwise" in code for code in codes)


def test_a_machine_without_the_kernels(
    reference: GraphModule, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = torch.compile(reference, backend=dynamo_backend(backend))
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    with pytest.raises(UnsupportedHostError, match="riscv64") as error:
        compile(reference, backend)
    assert error.value.machine == "riscv64"
    with pytest.raises(RuntimeError, match="UnsupportedHostError"):
        run(inputs())


def test_only_references_are_compiled(reference: GraphModule, backend: Any) -> None:
    with pytest.raises(LoweringError, match="not a Sequential"):
        compile(model(), backend)  # type: ignore[arg-type]
    with pytest.raises(LoweringError, match="lowered already"):
        compile(lower(reference, backend), backend)


def test_what_it_keeps(reference: GraphModule, backend: Any, codes: list[str]) -> None:
    """Nothing is compiled before the first call."""
    compiled = compile(reference, backend)

    assert isinstance(compiled, CompiledModel)
    assert compiled.reference is reference
    assert compiled.backend is backend
    assert codes == []
