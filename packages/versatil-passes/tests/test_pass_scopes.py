import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as config
from torch import Tensor
from torch.fx import Graph

from versatil_passes import (
    Int8Lowering,
    LoweringRules,
    OneDNNKernels,
    PassChain,
    PassOrderError,
    QuantLiftUp,
    pass_slots,
    pre_grad_passes,
)
from versatil_passes._torch_compat import unwrap_pass

RULES = LoweringRules(("x86_64",))
SLOT_NAMES = ("pre_grad_custom_pass", "post_grad_custom_post_pass")


def _slots() -> list[Any]:
    return [getattr(config, name) for name in SLOT_NAMES]


def _members(slot: Any) -> list[str]:
    chain = unwrap_pass(slot)
    return [type(member).__name__ for member in chain.passes]


def test_slots_are_as_before_afterwards() -> None:
    before = _slots()
    with pre_grad_passes(QuantLiftUp(), Int8Lowering(RULES)):
        first, second = _slots()
        assert _members(first) == ["QuantLiftUp", "Int8Lowering"]
        assert _members(second) == ["OneDNNKernels"]
    assert _slots() == before


def test_slots_are_as_before_after_an_exception() -> None:
    before = _slots()
    with pytest.raises(KeyError), pre_grad_passes(QuantLiftUp()):
        raise KeyError
    assert _slots() == before


def test_blocks_nest() -> None:
    with pre_grad_passes(QuantLiftUp()):
        outer = _slots()
        with pre_grad_passes(Int8Lowering(RULES)):
            assert _members(_slots()[0]) == ["QuantLiftUp", "Int8Lowering"]
        assert _slots() == outer


def test_a_pass_that_is_installed_already_is_not_installed_again() -> None:
    lowering = Int8Lowering(RULES)
    with pre_grad_passes(QuantLiftUp(), lowering), pre_grad_passes(QuantLiftUp(), lowering):
        assert _members(_slots()[0]) == ["QuantLiftUp", "Int8Lowering"]
        assert _members(_slots()[1]) == ["OneDNNKernels"]


def test_the_second_half_of_a_pass_inside_a_chain_is_installed_too() -> None:
    slots = pass_slots(PassChain(QuantLiftUp(), PassChain(Int8Lowering(RULES))))
    assert _members(slots["post_grad_custom_post_pass"]) == ["OneDNNKernels"]
    (kernels,) = unwrap_pass(slots["post_grad_custom_post_pass"]).passes
    assert isinstance(kernels, OneDNNKernels)
    assert kernels.allow_in_place


def test_a_pass_without_second_half_leaves_the_other_slot() -> None:
    assert pass_slots(QuantLiftUp()).keys() == {"pre_grad_custom_pass"}


def test_nothing_is_installed_in_a_wrong_order() -> None:
    before = _slots()
    with pytest.raises(PassOrderError), pre_grad_passes(Int8Lowering(RULES), QuantLiftUp()):
        pass
    assert _slots() == before


@pytest.mark.parametrize("kind", ["callable", "list"])
def test_the_users_own_passes_come_first(kind: str) -> None:
    def mine(_: Graph) -> None:
        pass

    held = mine if kind == "callable" else [mine]
    with config.patch(pre_grad_custom_pass=held):
        with pre_grad_passes(QuantLiftUp()):
            passes = unwrap_pass(config.pre_grad_custom_pass).passes
            assert passes[0] is mine
            assert type(passes[1]) is QuantLiftUp
        assert config.pre_grad_custom_pass is held


def _noting(log: list[str], name: str) -> Callable[[Graph], None]:
    def note(graph: Graph) -> None:
        assert len(graph.find_nodes(op="placeholder")) == 1
        log.append(name)

    return note


def _add_one(x: Tensor) -> Tensor:
    return x + 1


def test_torch_compile_runs_the_passes_once_and_only_inside() -> None:
    log: list[str] = []
    first, second = _noting(log, "first"), _noting(log, "second")
    compiled = torch.compile(_add_one)
    with config.patch(pre_grad_custom_pass=first), pre_grad_passes(second, first):
        assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))
    assert log == ["first", "second"]
    torch._dynamo.reset()
    torch.compile(_add_one)(torch.zeros(2))
    assert log == ["first", "second"]


def test_two_threads_see_their_own_passes() -> None:
    if not hasattr(config, "_hash_dirty_var"):
        pytest.skip("before torch 2.12 the config belongs to the process: see _ConfigLayers")
    barrier = threading.Barrier(2, timeout=30)
    before, found = _slots(), {}

    def run(name: str) -> None:
        log: list[str] = []
        with pre_grad_passes(_noting(log, name)):
            barrier.wait()
            (own,) = unwrap_pass(config.pre_grad_custom_pass).passes
            graph = Graph()
            graph.placeholder("x")
            own(graph)
            barrier.wait()
        found[name] = (log, _slots())

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: log for name, (log, _) in found.items()} == {"one": ["one"], "two": ["two"]}
    assert _slots() == before
