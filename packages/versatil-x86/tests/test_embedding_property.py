"""Random models of lookups and bags: int8, and equal to their reference to the bit."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from versatil_core import (
    audit,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    lower,
    quantize,
)
from versatil_x86 import X86InductorBackend

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


class Lookups(nn.Module):
    """Several tables, each looked up in by the same indices in the table's own form."""

    def __init__(self, tables: list[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, ids: Tensor, weights: Tensor) -> list[Tensor]:
        results = []
        for table in self.tables:
            if isinstance(table, nn.EmbeddingBag) and table.mode == "sum":
                results.append(table(ids, per_sample_weights=weights))
            else:
                results.append(table(ids))
        return results


class Case:
    """A model, what it takes, and how it is quantized."""

    def __init__(
        self, model: nn.Module, inputs: tuple[Tensor, ...], backend: X86InductorBackend
    ) -> None:
        self.model, self.inputs, self.backend = model, inputs, backend

    def __repr__(self) -> str:
        return f"{self.backend} of {self.inputs}: {self.model}"

    def reference(self) -> GraphModule:
        return quantize(self.model, self.inputs, self.backend, [self.inputs])


@st.composite
def cases(draw: st.DrawFn, min_tables: int = 1) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows = draw(st.integers(1, 30))
    tables: list[nn.Module] = []
    for _ in range(draw(st.integers(min_tables, 4))):
        features = draw(st.integers(5, 20))
        padding = draw(st.sampled_from([None, 0, -1]))
        mode: Any = draw(st.sampled_from([None, "sum", "mean", "max"]))
        values = torch.randn(rows, features, generator=generator)
        # Rows of very different sizes, one of zeros.
        values *= 10.0 ** torch.randint(-6, 6, (rows, 1), generator=generator)
        values[draw(st.integers(0, rows - 1))] = 0
        tables.append(
            nn.Embedding(rows, features, padding, _weight=values)
            if mode is None
            else nn.EmbeddingBag(rows, features, mode=mode, padding_idx=padding, _weight=values)
        )
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    ids = torch.randint(rows, shape, dtype=dtype, generator=generator)
    weights = torch.randn(shape, generator=generator)
    backend = X86InductorBackend(is_dynamic=draw(st.booleans()))
    return Case(Lookups(tables).eval(), (ids, weights), backend)


def assert_equal_lookups(reference: GraphModule, candidate: nn.Module, case: Case) -> None:
    assert isinstance(case.model, Lookups)
    report = check_exactness(reference, candidate, case.inputs)
    lookups = [op for op in report.ops if op.op.startswith("embedding")]
    assert len(lookups) == len(case.model.tables)
    assert {op.difference for op in report.ops} == {"equal"}


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_lowered_lookups_are_equal(case: Case) -> None:
    reference = case.reference()

    lowered = lower(reference, case.backend)

    assert audit(reference, case.backend).float_layers == ()
    assert_equal_lookups(reference, lowered, case)


# Not shrunk: each attempt would compile again.
@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(case=cases(min_tables=3))
def test_compiled_lookups_are_equal(case: Case) -> None:
    reference = case.reference()

    compiled = compile(reference, case.backend)

    assert_equal_lookups(reference, compiled, case)
    expected = reference(*case.inputs)
    for result, wanted in zip(compiled(*case.inputs), expected, strict=True):
        assert torch.equal(result, wanted)
