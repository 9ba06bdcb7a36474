"""Embeddings look up int8 rows: equal to the reference to the bit, and without a float table."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F  # noqa: N812 - the usual name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from versatil_passes import DecomposeQuantization, Int8Lowering, pass_slots
from versatil_passes.int8_embedding import MIN_ROW
from versatil_passes.lowering_record import NOT_ANNOTATED

aten, qd = torch.ops.aten, torch.ops.quantized_decomposed
DTYPES = st.sampled_from([torch.int32, torch.int64])


def table_of(rows: int, features: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Buffers of an int8 table whose scales differ by orders of magnitude."""
    exponents = torch.randint(-12, 3, (rows,), generator=generator)
    return {
        "weight": torch.randint(-128, 128, (rows, features), dtype=torch.int8, generator=generator),
        "scales": torch.rand(rows, generator=generator) * 2.0**exponents,
        "zero_points": torch.zeros(rows, dtype=torch.int64),
    }


class Lookup(nn.Module):
    """``function(table, *inputs)``, with the table as ``convert_pt2e`` leaves it."""

    def __init__(
        self,
        function: Callable[..., Any],
        buffers: dict[str, Tensor],
        *,
        is_per_row: bool = True,
    ) -> None:
        super().__init__()
        self.function, self.is_per_row = function, is_per_row
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *inputs: Any) -> Any:
        weight: Any = self.weight
        if self.is_per_row:
            arguments = (self.scales, self.zero_points, 0, -128, 127, torch.int8)
            table = qd.dequantize_per_channel(weight, *arguments)
        else:
            table = qd.dequantize_per_tensor(weight, 0.0123, 0, -128, 127, torch.int8)
        return self.function(table, *inputs)


class FloatShapes(Interpreter):
    """Runs a graph and remembers the shapes of its float values."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.seen: set[tuple[int, ...]] = set()

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            self.seen.add(tuple(value.shape))
        return value


def assert_equal(results: Any, expected: Any) -> None:
    assert results.dtype == expected.dtype
    assert results.shape == expected.shape
    assert torch.equal(results.view(torch.int32), expected.view(torch.int32))


def check(build: Any, module: Lookup, *inputs: Any, op: str) -> GraphModule:
    """Lower, and compare to the bit; return what was lowered."""
    exported: GraphModule = build.export(module, *inputs)
    expected = exported(*inputs)

    record = build.lower(exported)

    assert [(lowered.op, lowered.kernel) for lowered in record.lowered] == [(op, f"aten.{op}")]
    assert record.declined == ()
    assert "dequantize" not in str(exported.graph)
    assert_equal(exported(*inputs), expected)
    return exported


@given(data=st.data(), dtype=DTYPES, is_per_row=st.booleans(), seed=st.integers(0, 2**32))
@settings(deadline=None, derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck))
def test_a_lookup_is_equal_to_the_bit(
    data: st.DataObject, dtype: torch.dtype, seed: int, *, is_per_row: bool, build: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, features = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    indices = torch.randint(rows, shape, dtype=dtype, generator=generator)
    padding = data.draw(st.sampled_from([None, 0, rows - 1, -1]))
    module = Lookup(
        lambda table, i: F.embedding(i, table, padding),
        table_of(rows, features, generator),
        is_per_row=is_per_row,
    )

    check(build, module, indices, op="embedding")


@given(data=st.data(), dtype=DTYPES, seed=st.integers(0, 2**32))
@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_bag_is_equal_to_the_bit(
    data: st.DataObject, dtype: torch.dtype, seed: int, build: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, features = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 40))
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]))
    count = data.draw(st.integers(0, 12))
    indices = torch.randint(rows, (count,), dtype=dtype, generator=generator)
    starts = data.draw(st.lists(st.integers(0, count), max_size=4).map(sorted))
    includes_last = data.draw(st.booleans())
    offsets = torch.tensor([0, *starts, *([count] if includes_last else [])], dtype=dtype)
    weights = torch.randn(count, generator=generator)
    takes_weights = mode == "sum" and data.draw(st.booleans())
    options: dict[str, Any] = {
        "mode": mode,
        "include_last_offset": includes_last,
        "padding_idx": data.draw(st.sampled_from([None, 0, rows - 1, -1])),
    }

    def bag(table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        per_sample_weights = weights if takes_weights else None
        return F.embedding_bag(
            indices, table, offsets, per_sample_weights=per_sample_weights, **options
        )

    module = Lookup(bag, table_of(rows, features, generator))

    check(build, module, indices, offsets, weights, op="embedding_bag")


def test_no_value_of_the_graph_is_a_float_table(build: Any) -> None:
    buffers = table_of(23, 17, torch.Generator())
    module = Lookup(lambda table, i: F.embedding(i, table), buffers)
    lowered = check(build, module, torch.tensor([3, 22]), op="embedding")

    shapes: Any = FloatShapes(lowered)
    shapes.run(torch.tensor([3, 22]))

    assert shapes.seen == {(2, 17), (23,), (23, 1), (2, 1)}
    assert {str(node.target) for node in lowered.graph.find_nodes(op="get_attr")} == {
        *("weight", "scales")
    }


@pytest.mark.parametrize("name", ["lookup", "bag"])
def test_compiled_with_another_batch(name: str, build: Any) -> None:
    functions: dict[str, Callable[..., Any]] = {
        "lookup": lambda table, i: F.embedding(i, table),
        "bag": lambda table, i: F.embedding_bag(i, table, mode="mean", padding_idx=2),
    }
    module = Lookup(functions[name], table_of(23, 17, torch.Generator()))
    batch = torch.export.Dim("batch", min=1, max=64)
    indices = torch.randint(23, (4, 3))
    exported = build.export(module, indices, dynamic_shapes=((({0: batch}),),))
    lowering = Int8Lowering(build.rules)
    slots = pass_slots(lowering, DecomposeQuantization())

    with (
        torch._inductor.config.patch({"freezing": True, **slots}),
        torch._dynamo.config.patch(error_on_recompile=True),  # a size that was taken for fixed
        torch.no_grad(),
    ):
        compiled: Any = torch.compile(exported, dynamic=True)
        for size in (4, 2, 9):
            indices = torch.randint(23, (size, 3))
            assert_equal(compiled(indices), exported(indices))

    assert [op.op for op in lowering.record.lowered] == [
        "embedding" if name == "lookup" else "embedding_bag"
    ]


def test_two_lookups_and_a_linear_share_one_table(build: Any) -> None:
    buffers = table_of(12, 16, torch.Generator())
    buffers["scales"] = torch.full((12,), 0.01)

    def tied(table: Tensor, indices: Tensor) -> Tensor:
        x = F.embedding(indices, table) + F.embedding(indices.flip(0), table)
        return F.linear(build.through_int8(x), table)

    exported = build.export(Lookup(tied, buffers), torch.tensor([3, 11]))
    expected = exported(torch.tensor([3, 11]))

    record = build.lower(exported)

    assert [op.op for op in record.lowered] == ["embedding", "embedding", "linear"]
    assert "dequantize_per_channel" not in str(exported.graph)
    build.assert_exact(exported(torch.tensor([3, 11])), expected)


def embedding(table: Tensor, indices: Tensor) -> Tensor:
    return F.embedding(indices, table)


def renormalized(table: Tensor, indices: Tensor) -> Tensor:
    return F.embedding(indices, table, max_norm=1.0)


def with_out_dtype(b: Any, indices: Tensor) -> Tensor:
    arguments = (b.weight, b.scales, b.zero_points, 0, -128, 127, torch.int8)
    return F.embedding(indices, qd.dequantize_per_channel(*arguments, out_dtype=torch.bfloat16))


def along_features(b: Any, indices: Tensor) -> Tensor:
    arguments = (b.weight, b.scales, b.zero_points, 1, -128, 127, torch.int8)
    return F.embedding(indices, qd.dequantize_per_channel(*arguments))


def shifted_table(b: Any, indices: Tensor) -> Tensor:
    return F.embedding(indices, qd.dequantize_per_tensor(b.weight, 0.1, 3, -128, 127, torch.int8))


def unsigned_table(b: Any, indices: Tensor) -> Tensor:
    return F.embedding(indices, qd.dequantize_per_tensor(b.unsigned, 0.1, 0, 0, 255, torch.uint8))


def all_results(b: Any, indices: Tensor) -> Any:
    table = qd.dequantize_per_tensor(b.weight, 0.1, 0, -128, 127, torch.int8)
    found = aten.embedding_bag.padding_idx(
        table, indices, torch.tensor([0, 2]), False, 2, False, None, False, None
    )
    return found[0], found[3]


def plain(b: Any, indices: Tensor) -> Tensor:
    return F.embedding(indices, b.plain)


def plain_bag(b: Any, indices: Tensor) -> Tensor:
    return F.embedding_bag(indices[None], b.plain)


def computed(b: Any, indices: Tensor) -> Tensor:
    return F.embedding(indices, b.plain + indices[0])


def written(b: Any, indices: Tensor) -> Tensor:
    return F.embedding(indices, b.plain, max_norm=1.0)


SQUARE = table_of(16, 16, torch.Generator())


def declined(build: Any) -> dict[str, tuple[nn.Module, str]]:
    def case(function: Callable[..., Any], reason: str, **buffers: Tensor) -> Any:
        return build.function(function, **{**SQUARE, **buffers}), reason

    shifted = {"zero_points": torch.ones(16, dtype=torch.int64)}
    half = torch.randn(16, 16, dtype=torch.bfloat16)
    return {
        "not annotated": case(plain, f"its table is not quantized: {NOT_ANNOTATED}", plain=torch.randn(16, 16)),
        "bag not annotated": case(plain_bag, NOT_ANNOTATED, plain=torch.randn(16, 16)),
        "bf16": case(plain, "its table is torch.bfloat16; int8 stands for float32 only", plain=half),
        "computed": case(computed, "its table is no constant of the model", plain=torch.randn(16, 16)),
        "written": case(written, "an op writes to its table, as max_norm does", plain=torch.randn(16, 16)),
        "short rows": case(plain, f"rows of {MIN_ROW - 1} elements save nothing", plain=torch.randn(16, MIN_ROW - 1)),
        "renormalized": (Lookup(renormalized, SQUARE), "an op writes to its dequantized table"),
        "shifted": (Lookup(embedding, {**SQUARE, **shifted}), "not symmetric over constant rows"),
        "scales": (Lookup(embedding, {**SQUARE, "scales": torch.rand(16).double()}), "scales are torch.float64"),
        "along features": case(along_features, "not symmetric over constant rows"),
        "shifted table": case(shifted_table, "its table has zero_point 3"),
        "unsigned": case(unsigned_table, "its table is torch.uint8", unsigned=torch.zeros(16, 16, dtype=torch.uint8)),
        "computes in bf16": case(with_out_dtype, "it computes in torch.bfloat16"),
        "results": case(all_results, "more of its results are read"),
    }  # fmt: skip


NAMES = [
    "not annotated",
    "bag not annotated",
    "bf16",
    "computed",
    "written",
    "short rows",
    "renormalized",
    "shifted",
    "scales",
    "along features",
    "shifted table",
    "unsigned",
    "computes in bf16",
    "results",
]


def test_the_list_of_declined_cases_is_whole(build: Any) -> None:
    assert list(declined(build)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_declined_with_its_reason_and_left_as_it_was(name: str, build: Any) -> None:
    module, reason = declined(build)[name]
    exported = build.export(module, torch.tensor([3, 1, 3]))
    before = str(exported.graph)

    record = Int8Lowering(build.rules)(exported.graph)

    assert record.lowered == ()
    [found] = record.declined
    assert reason in found.reason
    assert str(exported.graph) == before


def test_a_table_that_is_an_input_stays_float(build: Any) -> None:
    """As in a graph of Dynamo's whose constants are not frozen."""
    module = build.function(
        lambda b, table, indices: F.embedding(
            indices,
            qd.dequantize_per_channel(table, b.scales, b.zero_points, 0, -128, 127, torch.int8),
        ),
        **SQUARE,
    )
    exported = build.export(module, SQUARE["weight"], torch.tensor([3]))

    [found] = Int8Lowering(build.rules)(exported.graph).declined

    assert "freezing is off" in found.reason


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [None, 3])
def test_a_bag_in_a_graph_without_values(
    padding: int | None, dtype: torch.dtype, build: Any
) -> None:
    """Some compilers hide dtypes and sizes from passes."""
    module = Lookup(lambda table, i: F.embedding_bag(i, table, padding_idx=padding), SQUARE)
    indices = torch.randint(16, (2, 3), dtype=dtype)
    exported = build.export(module, indices)
    expected = exported(indices)
    for node in exported.graph.nodes:
        node.meta.pop("val", None)

    record = build.lower(exported)

    assert [op.op for op in record.lowered] == ["embedding_bag"]
    assert_equal(exported(indices), expected)


def test_indices_of_two_dimensions_stay_float(build: Any) -> None:
    def bag(table: Tensor, indices: Tensor) -> Any:
        return aten.embedding_bag.padding_idx(
            table, indices, torch.tensor([0, 2]), False, 0, False, None, False, None
        )[0]

    exported = build.export(Lookup(bag, SQUARE), torch.zeros(2, 3, dtype=torch.int64))

    [found] = Int8Lowering(build.rules)(exported.graph).declined

    assert "its indices have 2 dimensions" in found.reason
