"""One process can hold the passes of both backends and of a user; none displaces another."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph

from versatil_arm import ArmInductorBackend
from versatil_core import (
    BasePT2EBackend,
    UnsupportedHostError,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    host_backend,
    lower,
    quantize,
    sqnr_db,
)
from versatil_passes import DecomposeQuantization, Int8Lowering, QuantLiftUp, pre_grad_passes
from versatil_passes._torch_compat import unwrap_pass
from versatil_x86 import X86InductorBackend

ORDERS = ["x86 outside", "arm outside"]
SLOTS = ("pre_grad_custom_pass", "post_grad_custom_post_pass")


def backends(order: str) -> tuple[BasePT2EBackend, BasePT2EBackend]:
    """Return the outer and the inner backend."""
    both = X86InductorBackend(), ArmInductorBackend()
    return both if order == "x86 outside" else (both[1], both[0])


class UsersPass:
    """A pass of the user, which counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Graph) -> None:
        """Read the graph."""
        assert graph.find_nodes(op="output")
        self.runs += 1

    def uuid(self) -> str:
        """Identity for compile caches."""
        return "users_pass/1"


class Model(torch.nn.Module):
    """What only x86 has kernels for, too: a grouped convolution, and one that is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = torch.nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.pointwise = torch.nn.Conv2d(8, 8, 1)
        self.hidden = torch.nn.Linear(8, 16)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, 4]`` for images ``[batch, 3, height, width]``."""
        x = self.stem(x).relu()
        x = (self.pointwise(self.grouped(x).relu()) + x).relu()
        logits: torch.Tensor = self.head(torch.nn.functional.gelu(self.hidden(x.mean((2, 3)))))
        return logits


@pytest.fixture(autouse=True)
def forget_compilations() -> Iterator[None]:
    """Let each test compile anew."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def members() -> list[str]:
    """Return the names of the passes in both slots."""
    chains = [unwrap_pass(getattr(inductor_config, slot)) for slot in SLOTS]
    return [type(member).__name__ for chain in chains for member in chain.passes]


def state() -> tuple[Any, ...]:
    """Return what belongs to the process."""
    return repr(inductor_config.get_config_copy()), dict(os.environ)


@pytest.mark.parametrize("order", ORDERS)
def test_contexts_nest_in_either_order(order: str) -> None:
    outer, inner = backends(order)
    before = state()
    users = UsersPass()
    kernels = ["OneDNNKernels", "GemmKernels"]
    if order == "arm outside":
        kernels.reverse()

    with inductor_config.patch(pre_grad_custom_pass=users):
        with outer.environment_context():
            alone = members()
            with inner.environment_context():
                pre_grad = unwrap_pass(inductor_config.pre_grad_custom_pass).passes
                assert members() == [
                    *("UsersPass", "QuantLiftUp", "QuantizeLayerOutputs", "KeepInt8"),
                    *("Int8Lowering", "Int8Lowering"),
                    *("SaturationCheck", "SaturationCheck", "DecomposeQuantization"),
                    *("KeepTransposedConvolutions", *kernels),
                ]
                rules = [item.rules for item in pre_grad if isinstance(item, Int8Lowering)]
                assert rules == [outer.lowering_rules, inner.lowering_rules]
            assert members() == alone
        assert inductor_config.pre_grad_custom_pass is users
    assert state() == before


@pytest.mark.parametrize("order", ORDERS)
def test_everything_is_restored_after_an_exception(order: str) -> None:
    outer, inner = backends(order)
    before = state()

    def fail() -> None:
        with outer.environment_context(), inner.environment_context():
            assert members()
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert state() == before


@pytest.mark.parametrize("order", ORDERS)
def test_pass_scopes_nest_in_either_order(order: str) -> None:
    outer, inner = (
        (QuantLiftUp(), Int8Lowering(backend.lowering_rules), DecomposeQuantization())
        for backend in backends(order)
    )
    users = UsersPass()

    with pre_grad_passes(*outer), pre_grad_passes(users), pre_grad_passes(*inner):
        found = unwrap_pass(inductor_config.pre_grad_custom_pass).passes
        assert {*outer[:2], users, inner[1]} <= set(found)
        assert isinstance(found[-1], DecomposeQuantization)
        assert [type(item).__name__ for item in found].count("Int8Lowering") == 2
    assert not getattr(inductor_config, SLOTS[0])


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="of x86's kernels")
@pytest.mark.parametrize("order", ORDERS)
def test_a_plain_compilation_inside_both_is_what_the_reference_says(order: str) -> None:
    """Whichever lowering takes a layer, a kernel runs it, and the user's pass runs."""
    outer, inner = backends(order)
    batch, users = torch.randn(4, 3, 16, 16), UsersPass()
    backend = X86InductorBackend(saturation="safe")
    reference = quantize(Model(), batch, backend, [batch])

    with (
        torch.no_grad(),
        inductor_config.patch(pre_grad_custom_pass=users),
        outer.environment_context(),
        inner.environment_context(),
    ):
        result = torch.compile(reference)(2 * batch)

    assert users.runs == 1
    # A residual is added in another order, so a few numbers round to the next step.
    assert sqnr_db(result, reference(2 * batch)) > 40


@pytest.mark.parametrize("order", ORDERS)
def test_our_own_compilation_inside_both_is_that_of_its_backend(order: str) -> None:
    outer, inner = backends(order)
    batch, backend = torch.randn(4, 3, 16, 16), host_backend()
    reference = quantize(Model(), batch, backend, [batch])

    with outer.environment_context(), inner.environment_context():
        lowered = lower(reference, backend)
    alone = lower(reference, backend)

    assert lowered.meta["versatil_lowering"] == alone.meta["versatil_lowering"]
    assert torch.equal(lowered(batch), alone(batch))
    check_exactness(reference, lowered, (batch,)).raise_if_inexact()


def test_two_threads_hold_one_each() -> None:
    if not hasattr(inductor_config, "_hash_dirty_var"):
        pytest.skip("before torch 2.12 the config belongs to the process")
    barrier = threading.Barrier(2, timeout=60)
    found = {}

    def hold(backend: BasePT2EBackend) -> None:
        with backend.environment_context():
            barrier.wait()
            found[backend.name] = members()[-1]
            barrier.wait()

    threads = [threading.Thread(target=hold, args=(item,)) for item in backends(ORDERS[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == {"x86_inductor": "OneDNNKernels", "arm_inductor": "GemmKernels"}
    assert not getattr(inductor_config, SLOTS[0])


def test_the_backend_of_the_other_machine_says_so() -> None:
    """It quantizes; what needs its kernels ends in an error that names the machine."""
    here = host_backend()
    other = next(item for item in backends(ORDERS[0]) if item.name != here.name)
    batch = torch.randn(4, 3, 16, 16)
    reference = quantize(Model(), batch, other, [batch])

    for make in (lower, compile):
        with pytest.raises(UnsupportedHostError, match=platform.machine().lower()):
            make(reference, other)
