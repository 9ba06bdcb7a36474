from collections.abc import Callable
from typing import Any

import pytest
from torch import fx
from torch.fx import Graph

from versatil_passes import (
    DecomposeQuantization,
    Int8Lowering,
    LoweringRules,
    PassChain,
    PassError,
    PassOrderError,
    QuantLiftUp,
    VersatilError,
    chain_pass,
)
from versatil_passes._torch_compat import pass_slot_value
from versatil_passes.pass_chain import name_of

RULES = LoweringRules(("x86_64",))


class Named:
    """A pass that notes its name when it runs."""

    def __init__(self, name: str, log: list[str], uuid: Any = None) -> None:
        self.__name__ = name
        self.log = log
        self._uuid = uuid

    def __call__(self, _: Graph) -> None:
        self.log.append(self.__name__)

    def uuid(self) -> Any:
        return self._uuid


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def graph() -> Graph:
    return fx.symbolic_trace(lambda x: x + 1).graph


def test_order_is_kept_and_chains_are_flattened(log: list[str], graph: Graph) -> None:
    a, b, c, d = (Named(name, log) for name in "abcd")

    chain = PassChain(a, PassChain(b, PassChain(c)), d)
    chain(graph)

    assert log == ["a", "b", "c", "d"]
    assert chain.passes == (a, b, c, d)
    assert repr(chain) == "PassChain(a, b, c, d)"


def test_the_same_object_runs_once_at_its_first_place(log: list[str], graph: Graph) -> None:
    a, b = Named("a", log), Named("b", log)
    PassChain(a, b, a, PassChain(b))(graph)
    assert log == ["a", "b"]


def test_equal_uuids_run_once(log: list[str], graph: Graph) -> None:
    PassChain(Named("a", log, "x"), Named("b", log, "y"), Named("c", log, "x"))(graph)
    assert log == ["a", "b"]


def test_passes_without_uuid_are_not_taken_for_one_another(log: list[str], graph: Graph) -> None:
    PassChain(Named("a", log), Named("b", log))(graph)
    assert log == ["a", "b"]


def test_an_empty_chain_does_nothing(graph: Graph) -> None:
    before = str(graph)
    PassChain()(graph)
    assert str(graph) == before


def test_the_uuid_covers_members_order_and_options(log: list[str]) -> None:
    a, b = Named("a", log, "a"), Named("b", log, "b")
    int8 = Int8Lowering(RULES)
    other = Int8Lowering(LoweringRules(("x86_64",), allow_int8_output=False))
    chains = [
        PassChain(),
        PassChain(a),
        PassChain(a, b),
        PassChain(b, a),
        PassChain(a, int8),
        PassChain(a, other),
    ]
    uuids = [chain.uuid() for chain in chains]
    assert None not in uuids
    assert len(set(uuids)) == len(chains)
    assert PassChain(a, PassChain(b)).uuid() == PassChain(a, b).uuid()


def test_one_member_without_uuid_leaves_the_chain_without(log: list[str]) -> None:
    identified = Named("a", log, "a")
    assert PassChain(identified, Named("b", log)).uuid() is None
    assert PassChain(identified, lambda _: None).uuid() is None
    assert PassChain(identified, PassChain(lambda _: None)).uuid() is None


def test_a_failure_names_what_ran_before(log: list[str], graph: Graph) -> None:
    cause = KeyError("linear_3")

    def fails(_: Graph) -> None:
        raise cause

    chain = PassChain(Named("first", log), QuantLiftUp(), fails, Named("never", log))
    with pytest.raises(PassError) as caught:
        chain(graph)

    assert caught.value.__cause__ is cause
    assert (caught.value.pass_name, caught.value.ran_before) == ("fails", ("first", "QuantLiftUp"))
    assert "fails failed after [first, QuantLiftUp]: KeyError" in str(caught.value)
    assert log == ["first"]


def test_a_wrong_order_is_refused_when_the_chain_is_built() -> None:
    with pytest.raises(PassOrderError) as caught:
        PassChain(Int8Lowering(RULES), QuantLiftUp())
    assert (caught.value.pass_name, caught.value.must_follow) == ("Int8Lowering", "QuantLiftUp")


def test_a_wrong_order_across_nested_chains_is_refused() -> None:
    with pytest.raises(PassOrderError, match="DecomposeQuantization must run after Int8Lowering"):
        PassChain(PassChain(DecomposeQuantization()), PassChain(Int8Lowering(RULES)))


def test_a_pass_need_not_be_there_to_come_first() -> None:
    assert len(PassChain(DecomposeQuantization()).passes) == 1
    assert len(PassChain(QuantLiftUp(), Int8Lowering(RULES), DecomposeQuantization()).passes) == 3


SLOTS: dict[str, Callable[[list[str]], Any]] = {
    "None": lambda _: None,
    "callable": lambda log: Named("a", log),
    "list": lambda log: [Named("a", log), Named("b", log)],
    "tuple": lambda log: (Named("a", log),),
    "empty list": lambda _: [],
    "chain": lambda log: PassChain(Named("a", log)),
    "ours": lambda log: pass_slot_value(PassChain(Named("a", log), Named("b", log))),
    "ours in a list": lambda log: [pass_slot_value(Named("a", log)), Named("b", log)],
}


@pytest.mark.parametrize("name", SLOTS)
def test_chain_pass_takes_whatever_a_slot_holds(name: str, log: list[str], graph: Graph) -> None:
    existing = SLOTS[name](log)
    new = Named("new", log)

    chain = chain_pass(existing, new)
    chain(graph)

    expected = {"None": "", "list": "ab", "empty list": "", "ours": "ab", "ours in a list": "ab"}
    assert log == [*expected.get(name, "a"), "new"]


@pytest.mark.parametrize("name", SLOTS)
def test_nothing_runs_twice_when_it_is_chained_twice(
    name: str, log: list[str], graph: Graph
) -> None:
    new = Named("new", log)
    once = chain_pass(SLOTS[name](log), new)
    twice = chain_pass(pass_slot_value(once), new)
    again = chain_pass([pass_slot_value(once), once], new)
    assert once.passes == twice.passes == again.passes
    assert twice.passes[-1] is new
    twice(graph)
    assert len(log) == len(set(log))


def test_a_pass_that_asks_whether_this_is_inference_is_told() -> None:
    passes = pytest.importorskip("torch._inductor.custom_graph_pass")
    if not hasattr(passes, "CustomInferenceAwareGraphPass"):
        pytest.skip("this torch has no such passes")
    told = []

    class Asks(passes.CustomInferenceAwareGraphPass):  # type: ignore[misc, name-defined]
        def __call__(self, graph: Graph, is_inference: bool) -> None:  # noqa: ARG002
            told.append(is_inference)

        def uuid(self) -> str:
            return "asks"

    PassChain(Asks())(Graph())
    assert told == [True]


def test_every_error_is_ours(graph: Graph) -> None:
    with pytest.raises(VersatilError):
        PassChain(lambda graph: graph.get_attr())(graph)  # type: ignore[call-arg]


def test_chains_of_two_backends_go_together() -> None:
    """What the first ends with must run after the lowering that the second brings."""
    other = LoweringRules(("aarch64",))
    mine = Named("mine", [])
    first, second = Int8Lowering(RULES), Int8Lowering(other)
    held = chain_pass(mine, PassChain(QuantLiftUp(), first, DecomposeQuantization()))

    chain = chain_pass(held, PassChain(QuantLiftUp(), second, DecomposeQuantization()))

    names = ["mine", "QuantLiftUp", "Int8Lowering", "Int8Lowering", "DecomposeQuantization"]
    assert [name_of(graph_pass) for graph_pass in chain.passes] == names
    assert chain.passes[2:4] == (first, second)
    assert held.passes == (mine, chain.passes[1], first, chain.passes[4])


def test_what_follows_a_pass_that_moves_moves_too(log: list[str]) -> None:
    last, other = Named("last", log), Named("other", log)
    last.runs_after = ("DecomposeQuantization",)  # type: ignore[attr-defined] # as a pass may have
    held = PassChain(DecomposeQuantization(), last, other)

    chain = chain_pass(held, Int8Lowering(RULES))

    names = ["other", "Int8Lowering", "DecomposeQuantization", "last"]
    assert [name_of(graph_pass) for graph_pass in chain.passes] == names
