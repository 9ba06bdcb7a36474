"""Float parts in bfloat16: every way to ask for them, static and dynamic, exact kernels, one dtype of results."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.fx import GraphModule
from typer.testing import CliRunner

from versatil_core import (
    AutocastError,
    BackendOptionError,
    LoweringError,
    QuantizationTarget,
    TargetError,
    audit,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    create_backend,
    load,
    load_package,
    lower,
    package,
    quantize,
    reference_info,
    save,
    sqnr_db,
    with_float_dtype,
)
from versatil_core.command import app
from versatil_x86 import X86InductorBackend

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)
MODES = pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


class FeedForward(nn.Module):
    """Norms, a gelu and a residual addition between linears."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.enter(x))
        y = self.norm(y + self.down(F.gelu(self.up(y))))
        return torch.softmax(self.head(y), -1)


class Images(nn.Module):
    """Convolutions that are added, pooled, and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.wide, self.narrow = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        y = F.max_pool2d(torch.relu(self.wide(x) + self.narrow(x)), 2)
        return self.head((torch.sigmoid(self.narrow(y)) * y).mean((2, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "feed forward": (FeedForward, (8, 32)),
    "attention": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 10, 32)),
    "images": (Images, (2, 3, 16, 16)),
}


def backend(is_dynamic: bool = False, float_dtype: Any = "float32") -> X86InductorBackend:
    return X86InductorBackend.for_host(is_dynamic=is_dynamic, float_dtype=float_dtype)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make().eval(), torch.randn(shape)


def quantized(
    model: nn.Module, inputs: Any, used: X86InductorBackend, **options: Any
) -> GraphModule:
    return quantize(model, inputs, used, [inputs], **options)


@MODES
@pytest.mark.parametrize("way", ["option", "weights", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_int8_and_exact(name: str, way: str, is_dynamic: bool) -> None:
    model, x = made(name)
    wanted = model(x)
    used = backend(is_dynamic, "float32" if way == "weights" else "bfloat16")
    if way != "option":
        model, x = model.to(BFLOAT16), x.to(BFLOAT16)
    reference = quantized(model, (x,), used)
    layers = [layer for layer in audit(reference, used).layers if "attention" not in layer.op]
    if not is_dynamic or name != "images" or "conv2d" in used.lowering_rules.dynamic_ops:
        assert all(layer.is_int8 for layer in layers)
        assert {layer.output_dtype for layer in layers} <= {"bfloat16", "uint8"}
        assert any(layer.output_dtype == "bfloat16" for layer in layers)
    expected, lowered = reference(x), lower(reference, used)
    assert expected.dtype is BFLOAT16
    assert sqnr_db(expected.float(), wanted) > 25
    check_exactness(reference, lowered, (x,)).raise_if_inexact()
    compiled = compile(reference, used)
    check_exactness(reference, compiled, (x,)).raise_if_inexact()
    assert compiled(x).dtype is BFLOAT16


@MODES
def test_a_kernel_rounds_the_exact_result_once(is_dynamic: bool) -> None:
    """At most one step of bfloat16 from the float32 result, and hardly ever that."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 128), nn.GELU()), torch.randn(64, 256)
    exact = quantized(model, (x,), backend(is_dynamic))(x)
    reference = quantized(model, (x,), backend(is_dynamic, BFLOAT16))
    for candidate in (reference, lower(reference, backend()), compile(reference, backend())):
        result = candidate(x)
        steps = (in_order(result) - in_order(exact.to(BFLOAT16))).abs()
        # Around 0 a step is so small that the order of summation is more than one.
        assert steps[exact.abs() > 1e-3].max() <= 1
        assert (steps != 0).double().mean() < 0.01


def in_order(values: Tensor) -> Tensor:
    """Integers that count the bfloat16 numbers below each value."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@MODES
def test_every_way_gives_the_same(is_dynamic: bool, tmp_path: Path) -> None:
    model, x = made("feed forward")
    plain, asking = backend(is_dynamic), backend(is_dynamic, BFLOAT16)
    float32 = quantized(model, (x,), plain)
    reference = quantized(model, (x,), asking)
    wanted = compile(reference, plain)(x)
    assert torch.equal(with_float_dtype(float32, BFLOAT16)(x), reference(x))
    with torch.autocast("cpu", BFLOAT16):
        by_autocast = compile(float32, plain)
        assert torch.equal(by_autocast(x), wanted)
        assert torch.equal(lower(float32, plain)(x), lower(reference, plain)(x))
    assert torch.equal(by_autocast(x), wanted)
    assert torch.equal(compile(float32, asking)(x), wanted)
    save(reference, tmp_path / "portable.pt2")
    loaded = load(tmp_path / "portable.pt2")
    assert torch.equal(loaded(x), reference(x))
    assert torch.equal(compile(loaded, plain)(x), wanted)
    assert reference_info(loaded).targets[0].options["float_dtype"] == "bfloat16"
    if not is_dynamic:
        package(float32, x, asking, tmp_path / "native.pt2")
        assert torch.equal(load_package(tmp_path / "native.pt2")(x), wanted)
    assert float32(x).dtype is FLOAT32


def test_names_of_weights_stay() -> None:
    model, x = made("feed forward")
    names = quantized(model, (x,), backend()).state_dict().keys()
    state = quantized(model, (x,), backend(float_dtype=BFLOAT16)).state_dict()
    assert state.keys() == names
    assert state["norm.weight"].dtype is BFLOAT16
    assert state["up.bias"].dtype is FLOAT32  # what a kernel adds before it rounds
    assert model.state_dict()["norm.weight"].dtype is FLOAT32


def test_a_second_time_changes_nothing() -> None:
    model, x = made("attention")
    reference = quantized(model, (x,), backend(float_dtype=BFLOAT16))
    assert str(with_float_dtype(reference, BFLOAT16).graph) == str(reference.graph)


class Attention(nn.Module):
    """What goes wrong where everything is cast: positions, masks, and casts of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("causal", torch.full((12, 12), torch.finfo(FLOAT32).min).triu(1))

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        positions = torch.arange(ids.shape[1], dtype=FLOAT32) + 1000
        turns = torch.cos(positions)
        x = self.table(ids)
        x = x + turns[None, :, None].type_as(x)
        q, k, v = self.qkv(x).chunk(3, -1)
        lowest = torch.finfo(FLOAT32).min
        scores = q @ k.transpose(-1, -2) / math.sqrt(32)
        scores = scores + ((1 - mask.to(FLOAT32)) * lowest)[:, None, :] + self.causal
        scores = scores.masked_fill(mask[:, None, :] == 0, lowest)
        y = self.out(torch.softmax(scores, -1, dtype=FLOAT32).type_as(q) @ v)
        return torch.tanh(y), y.float(), turns, y > 0


@MODES
@pytest.mark.parametrize("strict", [False, True])
def test_masks_positions_and_own_casts(is_dynamic: bool, strict: bool) -> None:
    torch.manual_seed(0)
    model, ids = Attention().eval(), torch.randint(50, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0], mask[1, 7:] = 0, 0
    used = backend(is_dynamic, BFLOAT16)
    reference = quantized(model, (ids, mask), used, strict=strict)
    compiled = compile(reference, used)
    check_exactness(reference, compiled, (ids, mask)).raise_if_inexact()
    wanted = model(ids, mask)
    for results in (reference(ids, mask), compiled(ids, mask)):
        assert [result.dtype for result in results] == [BFLOAT16, FLOAT32, FLOAT32, torch.bool]
        assert sqnr_db(results[0].float(), wanted[0]) > 25  # no infinity, no NaN
        torch.testing.assert_close(results[2], wanted[2])  # 1001 has no exact bfloat16


def test_weights_and_own_casts_give_the_same_dtypes() -> None:
    torch.manual_seed(0)
    model = Attention().eval().to(BFLOAT16)
    inputs = torch.randint(50, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    results = compile(quantized(model, inputs, backend()), backend())(*inputs)
    assert [result.dtype for result in results][:2] == [BFLOAT16, FLOAT32]


class Distances(nn.Module):
    """``cdist`` has no bfloat16 kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cdist(y, y) + 1


def test_what_has_no_bfloat16_kernel_computes_in_float32() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError):
        torch.cdist(x.to(BFLOAT16), x.to(BFLOAT16))
    used = backend(float_dtype=BFLOAT16)
    reference = quantized(Distances(), (x,), used)
    assert reference(x).dtype is BFLOAT16
    check_exactness(reference, lower(reference, used), (x,)).raise_if_inexact()


def test_state_is_left_alone() -> None:
    class Counter(FeedForward):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Tensor
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return super().forward(x) + self.calls

    x = torch.randn(8, 32)
    float32 = quantized(Counter().eval(), (x,), backend())
    reference = with_float_dtype(float32, BFLOAT16)
    assert reference.get_buffer("calls").item() == 0
    reference(x)
    assert reference.get_buffer("calls").item() == 1
    assert reference.get_buffer("calls").dtype is FLOAT32


def test_dynamic_shapes() -> None:
    model, x = made("feed forward")
    used = backend(float_dtype=BFLOAT16)
    shapes = ({0: torch.export.Dim("batch", min=2, max=100)},)
    compiled = compile(quantized(model, (x,), used, dynamic_shapes=shapes), used)
    assert compiled(torch.randn(5, 32)).shape == (5, 8)


def test_autocast_is_refused_where_it_cannot_be_followed() -> None:
    model, x = made("feed forward")
    float32 = quantized(model, (x,), backend())
    compiled = compile(float32, backend())
    with torch.autocast("cpu", BFLOAT16):
        with pytest.raises(AutocastError, match="float_dtype='bfloat16'"):
            quantized(model, (x,), backend())
        with pytest.raises(AutocastError, match="float_dtype='bfloat16'"):
            compiled(x)
        with torch.autocast("cpu", enabled=False):
            assert compiled(x).dtype is FLOAT32
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(AutocastError, match=r"torch\.float16"),
    ):
        compile(float32, backend())
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        torch.autocast("cpu", BFLOAT16),
        pytest.raises(Exception, match="float_dtype='bfloat16'"),
    ):
        torch.compile(float32, backend="versatil_x86")(x)


def test_what_is_refused() -> None:
    model, x = made("feed forward")
    with pytest.raises(BackendOptionError, match="float16 is not supported"):
        X86InductorBackend(float_dtype="float16")
    reference = quantized(model, (x,), backend(float_dtype=BFLOAT16))
    with pytest.raises(LoweringError, match="quantize the float model again"):
        with_float_dtype(reference, "float32")
    targets = [
        QuantizationTarget("up", backend()),
        QuantizationTarget("down", backend(float_dtype=BFLOAT16)),
    ]
    with pytest.raises(TargetError, match="'down' for bfloat16, 'up' for float32"):
        quantize(model, x, targets, [x])


def test_the_command_has_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch\ndef model():\n    return torch.nn.Linear(8, 4), (torch.randn(2, 8),)\n"
    (tmp_path / "in_bfloat16.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    wanted = ("--dynamic", "--backend", "x86_inductor", "--option", "float_dtype=bfloat16")
    result = CliRunner().invoke(app, ["quantize", "in_bfloat16:model", "-o", "model.pt2", *wanted])
    assert result.exit_code == 0, result.output
    reference = load("model.pt2")
    assert reference(torch.randn(2, 8)).dtype is BFLOAT16
    assert reference_info(reference).targets[0].options["float_dtype"] == "bfloat16"


def test_the_option_is_a_text() -> None:
    used = X86InductorBackend(float_dtype=BFLOAT16)
    assert used.float_dtype == "bfloat16"
    assert create_backend("x86_inductor", {"float_dtype": "bfloat16"}).float_dtype == "bfloat16"


ON_AN_OLDER_CPU = """
import torch
from torch import nn
from versatil_core import check_exactness, lower, quantize
from versatil_core.doctor import int8_plan
from versatil_x86 import X86InductorBackend

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)), torch.randn(8, 64)
for is_dynamic in (False, True):
    backend = X86InductorBackend.for_host(is_dynamic=is_dynamic, float_dtype="bfloat16")
    reference = quantize(model, (x,), backend, [(x,)])
    lowered = lower(reference, backend)
    check_exactness(reference, lowered, (x,)).raise_if_inexact()
    assert lowered(x).dtype is torch.bfloat16
assert int8_plan(backend).bfloat16 == (), int8_plan(backend)
"""


@pytest.mark.parametrize("isa", ["AVX512_CORE_VNNI", "AVX2"])
def test_a_cpu_without_bfloat16_instructions(isa: str) -> None:
    subprocess.run(
        [sys.executable, "-c", ON_AN_OLDER_CPU],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa},
        check=True,
    )
