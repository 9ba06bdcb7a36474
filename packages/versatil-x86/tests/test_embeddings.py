"""Embeddings are int8 from the float model to the package, and equal to their reference to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from versatil_core import (
    PackagingError,
    QuantizationTarget,
    audit,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    load,
    load_package,
    lower,
    package,
    quantize,
    save,
    sqnr_db,
)
from versatil_core._torch_compat import run_and_get_code
from versatil_x86 import X86InductorBackend

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)
BACKENDS = [
    X86InductorBackend(reduce_range=True),
    X86InductorBackend(is_dynamic=True, reduce_range=True),
    X86InductorBackend(saturation="safe"),
]
IDS = ["static", "dynamic", "safe"]
ROWS, FEATURES = 1009, 24  # sizes that nothing else has


class Words(nn.Module):
    """A lookup with a position added, a second lookup in the same table, and a bag with a padding index."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, FEATURES, padding_idx=0)
        self.positions = nn.Embedding(32, FEATURES)
        self.bag = nn.EmbeddingBag(rows, FEATURES, mode="mean", padding_idx=3)
        self.head = nn.Linear(FEATURES, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        x = x + self.words(ids[:, :1]) + self.bag(ids)[:, None]
        return self.head(x)


class LanguageModel(nn.Module):
    """The table of its input is the weight of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, FEATURES)
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.table(ids)).relu())


def ids(batch: int, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, ROWS, (batch, 6), dtype=dtype, generator=generator)


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


def quantized(model: nn.Module, backend: X86InductorBackend, **options: Any) -> GraphModule:
    batch = {"ids": {0: Dim("batch", min=1, max=64)}}
    return quantize(model.eval(), ids(4), backend, [ids(4)], dynamic_shapes=batch, **options)


def assert_lookups_are_equal(reference: GraphModule, candidate: nn.Module, inputs: Tensor) -> None:
    report = check_exactness(reference, candidate, (inputs,))
    report.raise_if_inexact()
    lookups = [op for op in report.ops if op.op.startswith("embedding")]
    assert lookups
    assert {op.difference for op in lookups} == {"equal"}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
def test_every_lookup_is_int8(backend: X86InductorBackend, *, strict: bool) -> None:
    model = Words()

    reference = quantized(model, backend, strict=strict)

    layers = audit(reference, backend).layers
    assert [(layer.module_path, layer.op, layer.is_int8) for layer in layers] == [
        ("words", "embedding", True),
        ("positions", "embedding", True),
        ("words", "embedding", True),
        ("bag", "embedding_bag", True),
        ("head", "linear", True),
    ]
    assert sqnr_db(reference(ids(4)), model(ids(4))) > 25
    lowered = lower(reference, backend)
    for batch in (1, 4, 9):
        assert_lookups_are_equal(reference, lowered, ids(batch))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_either_dtype(dtype: torch.dtype) -> None:
    backend, model = BACKENDS[0], Words().eval()
    reference = quantize(model, ids(4, dtype), backend, [ids(4, dtype)])

    assert audit(reference, backend).float_layers == ()
    assert_lookups_are_equal(reference, lower(reference, backend), ids(4, dtype))


@pytest.mark.parametrize("make", [Words, LanguageModel])
def test_compiled_there_is_no_float_table(make: Callable[[], nn.Module]) -> None:
    backend = BACKENDS[0]
    reference = quantized(make(), backend)
    compiled = compile(reference, backend)

    result, codes = run_and_get_code(lambda: compiled(ids(4)))

    assert sqnr_db(result, reference(ids(4))) > 60
    code = "\n".join(codes)
    assert f"({ROWS}, {FEATURES})" in code
    of_the_table = [line for line in code.splitlines() if f"({ROWS}, {FEATURES})" in line]
    assert not any("float32" in line for line in of_the_table), of_the_table
    assert_lookups_are_equal(reference, compiled, ids(4))
    assert sqnr_db(compiled(ids(9)), reference(ids(9))) > 60


@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
def test_a_tied_table_is_one_int8_tensor(backend: X86InductorBackend) -> None:
    reference = quantized(LanguageModel(), backend)

    result = audit(reference, backend)
    assert [(layer.op, layer.is_int8) for layer in result.layers] == [
        ("embedding", True),
        ("linear", True),
        ("linear", True),
    ]
    tables = [value for value in reference.state_dict().values() if value.shape[:1] == (ROWS,)]
    assert [table.dtype for table in tables if table.dim() == 2] == [torch.int8]
    assert result.saturating_layers == ()
    assert_lookups_are_equal(reference, lower(reference, backend), ids(4))


def test_a_head_that_stays_float_keeps_its_own_weight() -> None:
    backend = BACKENDS[0]
    target = QuantizationTarget("", backend, exclude=["head"])

    reference = quantize(LanguageModel().eval(), ids(4), target, [ids(4)])

    layers = {layer.module_path: layer.is_int8 for layer in audit(reference, backend).layers}
    assert layers == {"table": True, "inner": True, "head": False}
    assert_lookups_are_equal(reference, lower(reference, backend), ids(4))


@pytest.mark.parametrize(
    ("options", "int8"),
    [
        ({"operators": ["embedding"]}, {"words", "positions"}),
        ({"operators": ["embedding_bag"]}, {"bag"}),
        ({"operators": ["linear"]}, {"head"}),
        ({"exclude": ["words", "positions"]}, {"bag", "head"}),
    ],
)
def test_a_target_chooses(options: dict[str, list[str]], int8: set[str]) -> None:
    backend = BACKENDS[0]

    reference = quantize(
        Words().eval(), ids(4), QuantizationTarget("", backend, **options), [ids(4)]
    )

    layers = audit(reference, backend).layers
    assert {layer.module_path for layer in layers if layer.is_int8} == int8
    reasons = {layer.reason for layer in layers if not layer.is_int8}
    assert all("was quantized" in str(reason) for reason in reasons)


def test_the_file_is_smaller_and_gives_the_same(tmp_path: Path) -> None:
    backend = BACKENDS[0]
    tables = nn.Sequential(nn.Embedding(ROWS, FEATURES), nn.Linear(FEATURES, 2)).eval()
    without = QuantizationTarget("", backend, operators=["linear"])
    save(quantize(tables, ids(4), without, [ids(4)]), tmp_path / "float")
    reference = quantize(tables, ids(4), backend, [ids(4)])
    save(reference, tmp_path / "int8")
    sizes = {name: (tmp_path / name).stat().st_size for name in ("float", "int8")}

    loaded = load(tmp_path / "int8")

    # Of a row: 4 bytes each, against 1 each, 4 for the scale and 8 for the zero point.
    saved = ROWS * (4 * FEATURES - (FEATURES + 12))
    assert 0.9 * saved < sizes["float"] - sizes["int8"] <= saved
    assert torch.equal(loaded(ids(4)), reference(ids(4)))
    assert audit(loaded, backend).float_layers == ()
    assert_lookups_are_equal(loaded, lower(loaded, backend), ids(4))


def test_a_package_looks_up_int8(tmp_path: Path) -> None:
    backend, rows = BACKENDS[0], 20 * ROWS
    reference = quantized(Words(rows), backend)

    manifest = package(reference, ids(4), backend, tmp_path / "model.pt2")

    assert manifest.package is not None
    assert manifest.package.audit["int8_count"] == 5
    assert manifest.package.int8_kernel_calls == 1
    assert (tmp_path / "model.pt2").stat().st_size < 4 * rows * FEATURES  # of two tables
    packaged = load_package(tmp_path / "model.pt2")
    for batch in (4, 9):
        assert sqnr_db(packaged(ids(batch)), reference(ids(batch))) > 60


def test_a_package_of_a_table_that_is_written_is_refused(tmp_path: Path) -> None:
    """``max_norm`` shortens rows for good, and a package keeps nothing."""
    backend = BACKENDS[0]
    model = nn.Sequential(nn.Embedding(ROWS, FEATURES, max_norm=0.1), nn.Linear(FEATURES, 2))
    reference = quantize(model.eval(), ids(4), backend, [ids(4)])

    with pytest.raises(PackagingError, match="the model writes to its own"):
        package(reference, ids(4), backend, tmp_path / "model.pt2")


def test_a_model_of_a_table_alone(tmp_path: Path) -> None:
    backend, table = BACKENDS[1], nn.Embedding(ROWS, FEATURES).eval()
    reference = quantize(table, ids(4), backend)

    assert audit(reference, backend).int8_count == 1
    assert torch.equal(compile(reference, backend)(ids(4)), reference(ids(4)))
    package(reference, ids(4), backend, tmp_path / "model.pt2")
    assert torch.equal(load_package(tmp_path / "model.pt2")(ids(4)), reference(ids(4)))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Embedding(ROWS, 4), "rows of 4 elements save nothing"),
        (nn.Embedding(ROWS, FEATURES, max_norm=1.0), "an op writes to its table"),
        (nn.Embedding(ROWS, FEATURES).bfloat16(), "its table is torch.bfloat16"),
    ],
    ids=["short rows", "max_norm", "bf16"],
)
def test_a_table_that_stays_float_has_its_reason(model: nn.Module, reason: str) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = model, nn.Linear(6, 2)

        def forward(self, ids: Tensor) -> Any:
            return self.table(ids), self.linear(ids.float())

    backend = BACKENDS[0]
    reference = quantize(Both().eval(), ids(4), backend, [ids(4)])

    [found] = audit(reference, backend).float_layers
    assert reason in str(found.reason)
