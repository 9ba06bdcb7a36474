"""Faults that people who quantize for x86 have met, each with the right outcome.

Numbered as in the collection that they come from. What the docstring says is what a user expects.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F  # noqa: N812 -- the usual name
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch.export import Dim
from torch.fx import Graph, GraphModule

from versatil_core import (
    CalibrationError,
    QuantizationTarget,
    TargetError,
    audit,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    lower,
    quantize,
    save,
    sqnr_db,
)
from versatil_x86 import X86InductorBackend

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)

BACKEND = X86InductorBackend(reduce_range=True)  # exact on every CPU
DYNAMIC = X86InductorBackend(is_dynamic=True, reduce_range=True)


@pytest.fixture(autouse=True)
def same_weights() -> Iterator[None]:
    """Make models and inputs the same in every run, and leave no compilation behind."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def quantized(model: nn.Module, *inputs: Tensor, backend: Any = BACKEND, **options: Any) -> Any:
    return quantize(model.eval(), inputs, backend, [inputs], **options)


def code_of(run: Callable[..., Any], *inputs: Tensor) -> tuple[Any, str]:
    """Compile anew; return the result, and the generated code."""
    result, codes = run_and_get_code(run, *inputs)
    return result, "\n".join(codes)


def test_01_user_pass_survives() -> None:
    """Importing, quantizing and compiling drop no pass of the user; it runs, and before ours."""
    x = torch.randn(16, 64)
    found: list[bool] = []

    def mine(graph: Graph) -> None:
        found.append(any("linear" in str(node.target) for node in graph.nodes))

    with inductor_config.patch(pre_grad_custom_pass=mine):
        reference = quantized(two_linears(), x)
        _, code = code_of(compile(reference, BACKEND), x)
        assert inductor_config.pre_grad_custom_pass is mine

    assert found == [True]
    assert "qlinear_pointwise" in code


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_03_never_silently_float(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """Freezing is off and gradients are on, or it is inference mode: int8 kernels all the same."""
    x = torch.randn(16, 64)
    reference = quantized(two_linears(), x)
    assert inductor_config.freezing is False

    with mode():
        result, code = code_of(compile(reference, BACKEND), x.clone().requires_grad_())

    assert "qlinear_pointwise" in code
    assert not result.requires_grad
    assert sqnr_db(result, reference(x)) > 60


def test_03_also_with_plain_torch_compile() -> None:
    x = torch.randn(16, 64)
    reference = quantized(two_linears(), x)

    result, code = code_of(torch.compile(reference, backend="versatil_x86"), x)

    assert "qlinear_pointwise" in code
    assert sqnr_db(result.detach(), reference(x)) > 60


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.enc:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("module_path", "suggestion"),
    [
        ("hed", "head"),
        ("enc[0]", "enc.0"),
        ("L['self'].enc.0", "enc.0"),
        ("self.head", "head"),
        ("enc.2", "enc.0"),
    ],
)
def test_06_a_name_that_matches_nothing(module_path: str, suggestion: str) -> None:
    """It is an error that lists the nearest names, not a model that stays float."""
    x = torch.randn(4, 8)

    with pytest.raises(TargetError, match="did you mean") as error:
        quantize(Classifier(), x, QuantizationTarget(module_path, BACKEND), [x])

    assert error.value.module_paths == (module_path,)
    assert suggestion in error.value.suggestions


@pytest.mark.parametrize(
    ("module_path", "int8"), [("head", ["head"]), ("enc", ["enc.0", "enc.1"]), ("enc.1", ["enc.1"])]
)
def test_06_a_container_matches_what_is_inside(module_path: str, int8: list[str]) -> None:
    x = torch.randn(4, 8)

    reference = quantize(Classifier(), x, QuantizationTarget(module_path, BACKEND), [x])

    layers = audit(reference, BACKEND).layers
    assert [layer.module_path for layer in layers] == ["enc.0", "enc.1", "head"]
    assert [layer.module_path for layer in layers if layer.is_int8] == int8


class EveryLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(4, 4, 3)
        self.conv2d = nn.Conv2d(4, 4, 3)
        self.conv3d = nn.Conv3d(4, 4, 3)
        self.transposed = nn.ConvTranspose2d(4, 4, 3)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8)
        self.embedding = nn.Embedding(16, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, image: Tensor, volume: Tensor, words: Tensor, ids: Tensor) -> Any:
        convolved = self.conv1d(image[:, :, 0]), self.conv2d(image), self.conv3d(volume)
        recurrent = self.lstm(words)[0], self.gru(words)[0]
        functional = F.linear(words, self.weight), words @ self.weight
        products = torch.bmm(words, words.transpose(1, 2))
        attended = self.attention(words, words, words)[0], self.encoder(words)
        embedded = self.embedding(ids), self.transposed(image)
        return convolved, recurrent, functional, products, attended, embedded


INT8_LAYERS = {
    ("conv1d", "conv1d"),
    ("conv2d", "conv2d"),
    ("conv3d", "conv3d"),
    ("linear", "linear"),  # F.linear, named after its node
    ("linear_default", "linear"),  # words @ self.weight
    ("attention", "linear"),
    ("encoder.self_attn", "linear"),
    ("encoder.linear1", "linear"),
    ("encoder.linear2", "linear"),
    ("embedding", "embedding"),
}
FLOAT_LAYERS = {
    ("transposed", "conv_transpose2d"),
    ("lstm", "lstm"),
    ("gru", "gru"),
    ("bmm", "bmm"),
    ("attention", "bmm"),
    ("encoder.self_attn", "scaled_dot_product_attention"),
}


@pytest.mark.filterwarnings("ignore:The tensor attributes self:UserWarning")
def test_08_every_layer_is_int8_or_has_a_reason() -> None:
    """A report lists the layers that stay float, and why; none is passed over."""
    images, volume = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 6, 6, 6)
    inputs = (images, volume, torch.randn(2, 5, 8), torch.tensor([1, 2]))

    reference = quantized(EveryLayer(), *inputs)

    layers = audit(reference, BACKEND).layers
    named = {(layer.module_path or layer.node, layer.op) for layer in layers if layer.is_int8}
    assert named == INT8_LAYERS
    floats = {(layer.module_path or layer.node, layer.op) for layer in layers if not layer.is_int8}
    assert floats == FLOAT_LAYERS
    assert all(layer.op in str(layer.reason) for layer in layers if not layer.is_int8)
    check_exactness(reference, lower(reference, BACKEND), inputs).raise_if_inexact()


@pytest.mark.parametrize("calibration", [None, [], iter([])])
def test_11_no_calibration_is_refused(calibration: Any) -> None:
    """Without it the ranges would be those of nothing, and the output garbage."""
    with pytest.raises(CalibrationError, match="calibration"):
        quantize(two_linears(), torch.randn(4, 64), BACKEND, calibration)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def test_14_static_dynamic_and_float_in_one_model() -> None:
    """Each module by its own rule, whatever the order of the targets."""
    x = torch.randn(4, 8)
    targets = [QuantizationTarget("a", BACKEND), QuantizationTarget("b", DYNAMIC)]

    references = [
        quantize(Three(), x, ordered, [x]) for ordered in (targets, list(reversed(targets)))
    ]

    for reference in references:
        kinds = {op.module_path: op.is_dynamic for op in lowered_ops(reference)}
        assert kinds == {"a": False, "b": True}
        [declined] = audit(reference, BACKEND).float_layers
        assert declined.module_path == "c"
        check_exactness(reference, lower(reference, BACKEND), (x,)).raise_if_inexact()
    result, code = code_of(compile(references[0], BACKEND), x)
    assert "qlinear_pointwise" in code
    assert sqnr_db(result, references[0](x)) > 60


def lowered_ops(reference: GraphModule) -> Any:
    return lower(reference, BACKEND).meta["versatil_lowering"].lowered


@pytest.mark.parametrize("paths", [("a", "a"), ("", "b")])
def test_14_overlapping_targets_are_refused(paths: tuple[str, str]) -> None:
    x = torch.randn(4, 8)
    first, second = paths

    with pytest.raises(TargetError, match=f"{first!r} and {second!r} overlap") as error:
        quantize(
            Three(),
            x,
            [QuantizationTarget(first, BACKEND), QuantizationTarget(second, DYNAMIC)],
            [x],
        )

    assert error.value.module_paths == paths


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("example", [4, 1])
def test_15_lowered_for_every_batch(example: int, *, strict: bool) -> None:
    """A dynamic batch stays dynamic, also if the example is a batch of 1."""
    batch = {0: Dim("batch", min=1, max=64)}
    images = torch.randn(example, 3, 16, 16)
    reference = quantized(small_cnn(), images, dynamic_shapes=(batch,), strict=strict)
    lowered = lower(reference, BACKEND)

    for size in (1, 4, 9, 64):
        report = check_exactness(reference, lowered, (torch.randn(size, 3, 16, 16),))
        report.raise_if_inexact()


def test_15_one_compiled_model_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two: torch itself guards the batch of a convolution at 16, for its float kernels."""
    batch = {0: Dim("batch", min=1, max=64)}
    reference = quantized(small_cnn(), torch.randn(1, 3, 16, 16), dynamic_shapes=(batch,))
    compiled = compile(reference, BACKEND)
    codes: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))

    for size in (4, 9, 15, 64, 40):
        images = torch.randn(size, 3, 16, 16)
        assert sqnr_db(compiled(images), reference(images)) > 30  # an int8 step may flip
        assert len(codes) <= (1 if size < 16 else 2)

    for code in codes:
        assert "qconv_pointwise" in code
        assert "qlinear_pointwise" in code


FRESH_PROCESS = """
import sys
import torch
from torch._inductor.utils import run_and_get_code
from versatil_core import load

reference = load(sys.argv[1])
x = torch.randn(16, 64)
assert not any(name.startswith(("torchao.quantization", "versatil_x86")) for name in sys.modules)

def check(run):
    got, codes = run_and_get_code(run, x)
    assert "qlinear_pointwise" in "".join(codes)
    torch.testing.assert_close(got.detach(), reference(x), rtol=1e-3, atol=1e-3)

check(torch.compile(reference, backend="versatil_x86"))
from versatil_core import compile
from versatil_x86 import X86InductorBackend
check(compile(reference, X86InductorBackend.for_host()))
assert not any(name.startswith("torchao.quantization.pt2e.quantizer") for name in sys.modules)
"""

LASTING = """
import sys
import torch
import torch._inductor.config as config
from torch._inductor.utils import run_and_get_code
from versatil_core import load
from versatil_x86 import X86InductorBackend

reference = load(sys.argv[1])
assert config.freezing is False
X86InductorBackend.for_host().activate_environment()
assert config.freezing is True
with torch.no_grad():
    _, codes = run_and_get_code(torch.compile(reference), torch.randn(16, 64))
assert "qlinear_pointwise" in "".join(codes)
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the file of a saved reference."""
    save(quantized(two_linears(), torch.randn(16, 64)), tmp_path / "model.pt2")
    return tmp_path / "model.pt2"


def run_fresh(code: str, path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_28_nothing_has_to_be_imported_for_its_side_effects(saved: Path) -> None:
    """A fresh process that loads the model has the int8 kernels, without torchao's patterns."""
    run_fresh(FRESH_PROCESS, saved)


def test_29_a_plain_compilation_inside_the_context_is_frozen() -> None:
    """Setting TORCHINDUCTOR_FREEZING is too late once torch is imported; the context is not."""
    x = torch.randn(16, 64)
    reference = quantized(two_linears(), x)
    before = repr(inductor_config.get_config_copy()), os.environ.get("CUDA_VISIBLE_DEVICES")

    with BACKEND.environment_context(), torch.no_grad():
        assert inductor_config.freezing is True
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        result, code = code_of(torch.compile(reference), x)

    after = repr(inductor_config.get_config_copy()), os.environ.get("CUDA_VISIBLE_DEVICES")
    assert after == before
    assert "qlinear_pointwise" in code
    assert sqnr_db(result, reference(x)) > 60


def test_29_activating_lasts_until_the_first_call(saved: Path) -> None:
    run_fresh(LASTING, saved)
