"""What a backend sets is visible inside its context, and nothing is left of it afterwards."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch._inductor.config as inductor_config

from versatil_core.compile import inductor_values
from versatil_core.environment import environment_variables

Backend = Callable[..., Any]
NAME = "VERSATIL_TEST_BACKEND"


@pytest.fixture(autouse=True)
def unset() -> Iterator[None]:
    before = os.environ.pop(NAME, None)
    yield
    os.environ.pop(NAME, None)
    if before is not None:
        os.environ[NAME] = before


@pytest.mark.parametrize("before", [None, "", "mine"])
def test_variables_are_set_and_restored(before: str | None) -> None:
    if before is not None:
        os.environ[NAME] = before

    with environment_variables({NAME: "on"}):
        assert os.environ[NAME] == "on"

    assert os.environ.get(NAME) == before


def test_restored_after_an_exception() -> None:
    with pytest.raises(KeyError), environment_variables({NAME: "on"}):
        raise KeyError

    assert NAME not in os.environ


def test_nesting() -> None:
    with environment_variables({NAME: "outer"}):
        with environment_variables({NAME: "inner"}):
            assert os.environ[NAME] == "inner"
        assert os.environ[NAME] == "outer"

    assert NAME not in os.environ


@pytest.mark.parametrize("leaves_first", ["first", "second"])
def test_threads_may_leave_in_any_order(leaves_first: str) -> None:
    entered = {name: threading.Event() for name in ("first", "second")}
    leave = {name: threading.Event() for name in ("first", "second")}

    def work(name: str) -> None:
        with environment_variables({NAME: name}):
            entered[name].set()
            assert leave[name].wait(10)

    threads = {name: threading.Thread(target=work, args=(name,)) for name in entered}
    for name, thread in threads.items():
        thread.start()
        assert entered[name].wait(10)

    other = "second" if leaves_first == "first" else "first"
    leave[leaves_first].set()
    threads[leaves_first].join(10)
    assert os.environ[NAME] == other
    leave[other].set()
    threads[other].join(10)
    assert NAME not in os.environ


def test_context_sets_config_and_variables(linear_backend: Backend) -> None:
    """Case 29: setting TORCHINDUCTOR_FREEZING now would come too late."""
    before = inductor_config.freezing

    with linear_backend().environment_context():
        assert inductor_config.freezing is True
        assert os.environ[NAME] == "on"

    assert inductor_config.freezing is before
    assert NAME not in os.environ


def test_context_restores_everything_after_an_exception(linear_backend: Backend) -> None:
    before = repr(inductor_config.get_config_copy())

    with pytest.raises(KeyError), linear_backend().environment_context():
        raise KeyError(repr(inductor_config.get_config_copy()) == before)

    assert repr(inductor_config.get_config_copy()) == before
    assert NAME not in os.environ


def test_context_keeps_the_passes_of_the_user(linear_backend: Backend) -> None:
    def mine(graph: Any) -> None:
        pass

    with inductor_config.patch(pre_grad_custom_pass=mine):
        with linear_backend().environment_context():
            assert inductor_config.pre_grad_custom_pass is not mine
        assert inductor_config.pre_grad_custom_pass is mine


def test_activating_stays(linear_backend: Backend) -> None:
    code = threading.Thread(target=_activate_and_check, args=(linear_backend(),))
    code.start()
    code.join(30)

    assert not code.is_alive()
    assert os.environ[NAME] == "on"


def _activate_and_check(backend: Any) -> None:
    # In a thread of its own, since from torch 2.12 on its configuration ends with it.
    before = {name: getattr(inductor_config, name) for name in inductor_values(backend)}
    try:
        backend.activate_environment()
        assert inductor_config.freezing is True
        assert inductor_config.pre_grad_custom_pass is not before["pre_grad_custom_pass"]
    finally:
        for name, value in before.items():
            setattr(inductor_config, name, value)


def test_activating_inside_a_context_outlives_it(linear_backend: Backend) -> None:
    backend = linear_backend()
    with environment_variables({NAME: "off"}):
        threading.Thread(target=_activate_and_check, args=(backend,)).run()

    assert os.environ[NAME] == "on"
