"""Whole models with pair-safe weights: no layer may saturate, and every op is exact, also far outside the calibration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from versatil_core import (
    audit,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    lower,
    quantize,
    sqnr_db,
)
from versatil_passes import LoweringRules
from versatil_x86 import CPUFeatures, X86InductorBackend
from versatil_x86.rules import x86_lowering_rules

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


class WithoutVNNI(X86InductorBackend):
    """What the backend is on a CPU with AVX2 alone, whatever this one is."""

    @property
    def lowering_rules(self) -> LoweringRules:
        return x86_lowering_rules(CPUFeatures(avx2=True))


class Convolutions(nn.Module):
    """A residual block, and a grouped, a depthwise and a one-dimensional convolution."""

    shape = (8, 3, 12, 12)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.block, self.shortcut = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.grouped = nn.Conv2d(16, 24, 3, groups=4)
        self.depthwise = nn.Conv2d(24, 24, 3, groups=24)
        self.sequence = nn.Conv1d(24, 9, 3)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.stem(x)))
        y = torch.relu(self.block(y) + self.shortcut(y))
        y = torch.relu(self.depthwise(torch.relu(self.grouped(y))))
        return self.head(torch.relu(self.sequence(y.flatten(2))).mean(2))


class Perceptron(nn.Sequential):
    """Widths that oneDNN cuts in two odd halves."""

    shape = (16, 40)

    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(40, 261), nn.ReLU(), nn.Linear(261, 258), nn.GELU(), nn.Linear(258, 7))
        )


class Transformer(nn.Module):
    shape = (2, 9, 32)

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 130), nn.Linear(130, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (p(y).unflatten(2, (4, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


# The model, and how many of its layers are int8.
MODELS: dict[str, tuple[Any, int]] = {
    "convolutions": (Convolutions, 7),
    "perceptron": (Perceptron, 3),
    "transformer": (Transformer, 6),
}


def model_of(name: str, *, is_adverse: bool) -> tuple[nn.Module, list[Tensor], Tensor]:
    """A model, calibration and other inputs of its kind; adverse is: weights of one sign, on which sums saturate."""
    torch.manual_seed(0)
    kind, _ = MODELS[name]
    model = kind().eval()
    if is_adverse:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.abs_()
    calibration, inputs = [*torch.randn(4, *kind.shape)], torch.randn(kind.shape)
    return model, calibration, inputs


@pytest.mark.parametrize(
    ("name", "is_dynamic"),
    [
        *((name, False) for name in MODELS),
        *((name, True) for name in MODELS if name != "convolutions"),
        pytest.param("convolutions", True, marks=pytest.mark.dynamic_convolution),
    ],
)
@pytest.mark.parametrize("is_adverse", [False, True], ids=["random", "one sign"])
def test_no_layer_may_saturate_and_every_op_is_exact(
    name: str, *, is_adverse: bool, is_dynamic: bool
) -> None:
    model, calibration, inputs = model_of(name, is_adverse=is_adverse)
    backend = WithoutVNNI(is_dynamic=is_dynamic, saturation="safe")

    reference = quantize(model, inputs, backend, None if is_dynamic else calibration)

    found = audit(reference, backend)
    assert found.int8_count == MODELS[name][1]
    assert found.float_layers == () or name == "transformer"  # attention is float
    assert found.saturating_layers == ()
    sums = {layer.module_path: (layer.pair_sum, layer.pair_limit) for layer in found.layers}
    int8_sums = [pair for pair in sums.values() if pair != (None, None)]
    assert len(int8_sums) == MODELS[name][1]
    assert all(pair_sum <= limit == 128 for pair_sum, limit in int8_sums if pair_sum and limit)
    assert sqnr_db(reference(inputs), model(inputs)) > (10 if is_adverse else 20)

    lowered = lower(reference, backend)  # and no warning, which would be an error
    for scale in (1, 10):
        x = scale * inputs
        check_exactness(reference, lowered, (x,), float_model=model).raise_if_inexact()


def test_without_the_bound_the_same_models_may_saturate() -> None:
    """That the test above can fail."""
    backend = WithoutVNNI(saturation="ignore")
    for name, (_, layers) in MODELS.items():
        model, calibration, inputs = model_of(name, is_adverse=True)
        reference = quantize(model, inputs, backend, calibration)
        assert len(audit(reference, backend).saturating_layers) >= layers - 1, name


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_models_are_exact(*, is_dynamic: bool) -> None:
    # A compilation takes long: both kinds of layers in one model.
    name = "perceptron" if is_dynamic else "convolutions"
    model, calibration, inputs = model_of(name, is_adverse=True)
    backend = X86InductorBackend(is_dynamic=is_dynamic, saturation="safe")
    reference = quantize(model, inputs, backend, None if is_dynamic else calibration)

    compiled = compile(reference, backend)

    report = check_exactness(reference, compiled, (10 * inputs,), float_model=model)
    report.raise_if_inexact()
    assert report.loss_db is not None
    assert report.loss_db <= 0.3
    torch._dynamo.reset()


def test_safe_weights_are_nearer_to_float_than_a_reduced_range() -> None:
    for name in ("perceptron", "transformer"):
        model, calibration, inputs = model_of(name, is_adverse=False)
        found = {}
        for saturation in ("ignore", "safe", "reduce_range"):
            backend = X86InductorBackend(saturation=saturation)
            reference = quantize(model, inputs, backend, calibration)
            found[saturation] = sqnr_db(reference(inputs), model(inputs))
        assert found["safe"] > found["reduce_range"] + 1, (name, found)
        assert found["safe"] > found["ignore"] - 1.5, (name, found)
