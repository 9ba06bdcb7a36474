import threading
from typing import Any

import pytest
import torch
import torch._inductor.config as config
from torch.fx import Graph

from versatil_passes import _torch_compat
from versatil_passes._torch_compat import (
    _ConfigLayers,
    pass_slot_value,
    patch_inductor_config,
    unwrap_pass,
    uuid_of,
)


class Pass:
    def __init__(self) -> None:
        self.seen: list[Graph] = []

    def __call__(self, graph: Graph) -> None:
        self.seen.append(graph)

    def uuid(self) -> str:
        return "a pass"


def test_a_slot_value_is_a_pass_that_inductor_knows() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    inner, graph = Pass(), Graph()
    value = pass_slot_value(inner)
    value(graph)
    assert isinstance(value, CustomGraphPass)
    assert value.uuid() == "a pass"
    assert inner.seen == [graph]


def test_unwrapping_is_the_inverse() -> None:
    inner = Pass()
    assert unwrap_pass(pass_slot_value(inner)) is inner
    assert unwrap_pass(inner) is inner
    assert unwrap_pass(print) is print


def test_a_function_has_no_uuid() -> None:
    assert uuid_of(print) is None
    assert uuid_of(pass_slot_value(lambda _: None)) is None


@pytest.fixture(params=["own patch", "layers"])
def _each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch from 2.12 on does it, and as before."""
    if request.param == "layers":
        monkeypatch.setattr(_torch_compat, "_is_config_per_thread", lambda: False)


@pytest.mark.usefixtures("_each_way")
def test_values_are_put_back() -> None:
    before = config.epilogue_fusion, config.max_fusion_size
    with patch_inductor_config({"epilogue_fusion": not before[0], "max_fusion_size": 7}):
        assert (config.epilogue_fusion, config.max_fusion_size) == (not before[0], 7)
        with patch_inductor_config({"max_fusion_size": 8}):
            assert config.max_fusion_size == 8
        assert config.max_fusion_size == 7
    assert (config.epilogue_fusion, config.max_fusion_size) == before


@pytest.mark.usefixtures("_each_way")
def test_values_are_put_back_after_an_exception() -> None:
    before = config.max_fusion_size
    with pytest.raises(KeyError), patch_inductor_config({"max_fusion_size": 7}):  # noqa: PT012
        assert config.max_fusion_size == 7
        raise KeyError
    assert config.max_fusion_size == before


@pytest.mark.usefixtures("_each_way")
def test_an_unknown_name_changes_nothing() -> None:
    before = config.max_fusion_size
    with (
        pytest.raises(Exception, match="no_such_setting"),
        patch_inductor_config({"max_fusion_size": 7, "no_such_setting": 1}),
    ):
        pass
    assert config.max_fusion_size == before
    with patch_inductor_config({"max_fusion_size": 9}):
        assert config.max_fusion_size == 9
    assert config.max_fusion_size == before


@pytest.mark.usefixtures("_each_way")
def test_two_threads() -> None:
    """Blocks of two threads overlap; when both are over, everything is as before."""
    before = config.max_fusion_size
    barrier = threading.Barrier(2, timeout=30)
    failures: list[BaseException] = []

    def run(value: int, rounds: int) -> None:
        try:
            for _ in range(rounds):
                with patch_inductor_config({"max_fusion_size": value}):
                    barrier.wait()
                    assert config.max_fusion_size in {11, 12}
                barrier.wait()
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(value, 20)) for value in (11, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert config.max_fusion_size == before


def test_layers_that_do_not_end_in_order() -> None:
    """A value is that of the newest open layer, or the original."""
    original = config.max_fusion_size, config.epilogue_fusion
    layers = _ConfigLayers()

    first = layers.push({"max_fusion_size": 1, "epilogue_fusion": not original[1]})
    second = layers.push({"max_fusion_size": 2})
    third = layers.push({"max_fusion_size": 3})
    assert config.max_fusion_size == 3
    layers.pop(second)
    assert config.max_fusion_size == 3
    layers.pop(third)
    assert (config.max_fusion_size, config.epilogue_fusion) == (1, not original[1])
    fourth = layers.push({"max_fusion_size": 4})
    layers.pop(first)
    assert (config.max_fusion_size, config.epilogue_fusion) == (4, original[1])
    layers.pop(fourth)
    assert (config.max_fusion_size, config.epilogue_fusion) == original


def test_layers_with_equal_values_are_told_apart() -> None:
    original = config.max_fusion_size
    layers = _ConfigLayers()
    first, second = layers.push({"max_fusion_size": 1}), layers.push({"max_fusion_size": 1})
    layers.pop(first)
    assert config.max_fusion_size == 1
    layers.pop(second)
    assert config.max_fusion_size == original


def test_layers_remember_the_original_of_the_day() -> None:
    """What the user sets between two blocks is what the second one puts back."""
    layers = _ConfigLayers()
    with config.patch(max_fusion_size=5):
        layers.pop(layers.push({"max_fusion_size": 1}))
        config.max_fusion_size = 6
        layers.pop(layers.push({"max_fusion_size": 2}))
        assert config.max_fusion_size == 6


def test_storage_and_shape() -> None:
    base: Any = torch.zeros(4, 6)
    assert _torch_compat.storage_id(base) == _torch_compat.storage_id(base.t()[1:])
    assert _torch_compat.storage_id(base) != _torch_compat.storage_id(base.clone())
    assert _torch_compat.same_shape(base, base.clone())
    assert not _torch_compat.same_shape(base, base.t())
    assert not _torch_compat.same_shape(base, base[None])
