"""Copies of each kind of model compute the same; modes change nothing; what can't be pickled says so."""

import copy
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch import nn

from versatil_core import (
    LoweringError,
    compile,  # noqa: A004 -- the verb
    lower,
    quantize,
)
from versatil_x86 import X86InductorBackend

BACKEND = X86InductorBackend(saturation="safe")
BATCH = torch.export.Dim("batch", max=64)


@pytest.fixture(scope="module")
def reference() -> torch.fx.GraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(576, 8)
    )
    x = torch.randn(4, 3, 8, 8)
    return quantize(model, x, BACKEND, [x], dynamic_shapes={"input": {0: BATCH}})


@pytest.fixture(scope="module")
def lowered(reference: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return lower(reference, BACKEND)


@pytest.fixture(scope="module")
def compiled(reference: torch.fx.GraphModule) -> nn.Module:
    return compile(reference, BACKEND)


@pytest.fixture(params=["reference", "lowered", "compiled"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    found: nn.Module = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def test_a_copy_computes_the_same(model: nn.Module, x: torch.Tensor) -> None:
    with warnings.catch_warnings():
        # torch warns of its own classes while it copies a reference.
        warnings.simplefilter("ignore", FutureWarning)
        copied = copy.deepcopy(model)

    assert copied is not model
    assert type(copied).__name__ == type(model).__name__
    assert torch.equal(copied(x), model(x))


def test_a_copy_has_weights_of_its_own(reference: torch.fx.GraphModule, x: torch.Tensor) -> None:
    compiled = compile(reference, BACKEND)
    expected = reference(x)

    copied = copy.deepcopy(compiled)
    with torch.no_grad():
        for value in copied.reference.state_dict().values():
            value.zero_()

    assert torch.equal(reference(x), expected)
    assert not torch.equal(copied(x), expected)


def test_modes_change_nothing(model: nn.Module, x: torch.Tensor) -> None:
    expected = model(x)

    for change in (model.train, model.eval):
        assert torch.equal(change()(x), expected)
    assert model.train().training
    assert not model.eval().training


@pytest.mark.parametrize(
    ("kind", "remedy"), [("lowered", "save\\(\\)"), ("compiled", "package\\(\\)")]
)
def test_what_cannot_be_pickled_names_the_way(
    request: pytest.FixtureRequest, kind: str, remedy: str
) -> None:
    with pytest.raises(LoweringError, match=remedy):
        pickle.dumps(request.getfixturevalue(kind))


@pytest.mark.parametrize("make", [lower, compile])
def test_threads_get_what_one_gets(
    reference: torch.fx.GraphModule, make: Callable[..., nn.Module]
) -> None:
    """Also if the first call, which compiles, is in all of them at once."""
    batches = [torch.randn(1 + n % 5, 3, 8, 8) for n in range(64)]
    model, expected = make(reference, BACKEND), [lower(reference, BACKEND)(x) for x in batches]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(model, batches))

    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


def test_memory_does_not_grow(compiled: nn.Module) -> None:
    process, batches = psutil.Process(), [torch.randn(n, 3, 8, 8) for n in (1, 2, 3, 8)]

    def run(times: int) -> int:
        for _ in range(times):
            for x in batches:
                compiled(x)
        return int(process.memory_info().rss)

    before = run(100)
    grown = run(500) - before

    # 2000 calls: a leak of one input or intermediate result in each would be several MB.
    assert grown < 2**20
