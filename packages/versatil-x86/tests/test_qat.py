"""Quantization-aware training for x86: the trained model runs on the same int8 kernels, exactly."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from versatil_core import (
    QuantizationTarget,
    audit,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    convert,
    create_backend,
    load,
    load_package,
    lower,
    package,
    prepare_qat,
    quantize,
    reference_info,
    report,
    save,
    sqnr_db,
)
from versatil_core.demo_digits import DigitsNet
from versatil_x86 import X86InductorBackend

IMAGES = torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8)
SATURATION = ["safe", "reduce_range", "ignore"]


def trained(module: GraphModule, steps: int = 4) -> GraphModule:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(module(IMAGES), LABELS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return module


def network() -> nn.Module:
    torch.manual_seed(0)
    return DigitsNet()


def int8_layers(reference: GraphModule, backend: X86InductorBackend) -> list[tuple[str, bool]]:
    return [(layer.module_path, layer.is_int8) for layer in audit(reference, backend).layers]


@pytest.mark.parametrize(
    "is_dynamic", [False, pytest.param(True, marks=pytest.mark.dynamic_convolution)]
)
@pytest.mark.parametrize("saturation", SATURATION)
def test_a_trained_model_is_int8_and_exact(saturation: str, *, is_dynamic: bool) -> None:
    model, backend = network(), X86InductorBackend(is_dynamic, saturation=saturation)
    trainable = trained(prepare_qat(model, IMAGES, backend)).eval()

    reference = convert(trainable)

    with torch.no_grad():
        # A measured scale is computed in other steps, which decides a few ties otherwise.
        assert sqnr_db(reference(IMAGES), trainable(IMAGES)) > (60 if is_dynamic else 100)
    layers = int8_layers(reference, backend)
    assert layers == int8_layers(quantize(model, IMAGES, backend, [IMAGES]), backend)
    assert all(is_int8 for _, is_int8 in layers)
    assert len(layers) == 8
    # Without VNNI, products may saturate if nothing is done about it.
    if saturation != "ignore" or X86InductorBackend.for_host().saturation == "ignore":
        check_exactness(reference, lower(reference, backend), (IMAGES,)).raise_if_inexact()


def test_everything_takes_a_trained_model(tmp_path: Path) -> None:
    model, backend = network().eval(), X86InductorBackend.for_host()
    trainable = trained(prepare_qat(model, IMAGES, backend), steps=8)
    reference = convert(trainable.eval())
    wanted = reference(IMAGES)

    assert sqnr_db(compile(reference, backend)(IMAGES), wanted) > 25
    save(reference, tmp_path / "model.pt2")
    assert torch.equal(load(tmp_path / "model.pt2")(IMAGES), wanted)
    package(reference, IMAGES, backend, tmp_path / "model.versatil")
    assert sqnr_db(load_package(tmp_path / "model.versatil")(IMAGES), wanted) > 25
    assert report(model, reference, backend, [IMAGES], parts=["kernels"]).layers
    [target] = reference_info(reference).targets
    assert target.options == {
        "is_dynamic": False,
        "is_qat": True,
        "reduce_range": backend.reduce_range,
        "saturation": backend.saturation,
        "float_dtype": "float32",
    }
    assert target.reasons == backend.option_reasons
    assert create_backend(target.backend, target.options).is_qat


def test_static_and_dynamic_in_one_model() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(8, 16)
    targets = [
        QuantizationTarget("0", X86InductorBackend(saturation="safe")),
        QuantizationTarget("3", X86InductorBackend(is_dynamic=True, saturation="safe")),
    ]
    trainable = prepare_qat(model, x, targets)
    trainable(x).square().mean().backward()

    reference = convert(trainable.eval())

    assert sqnr_db(reference(x), trainable(x)) > 100
    backend = X86InductorBackend()
    assert [is_int8 for _, is_int8 in int8_layers(reference, backend)] == [True, True]
    check_exactness(reference, lower(reference, backend), (x,)).raise_if_inexact()


class TwoNorms(nn.Module):
    """One convolution with two batch norms, and another whose output is read past its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.norms
        for norm in (first, second):
            x = torch.relu(norm(self.conv(x)))
        y = self.other(x)
        return y + last(y)


def test_batch_norms_fold_into_what_is_lowered() -> None:
    torch.manual_seed(0)
    model, x = TwoNorms(), torch.randn(4, 4, 8, 8)
    for _ in range(20):
        model(x)
    model.eval()
    with torch.no_grad():
        model.get_parameter("norms.1.weight").normal_()
    backend = X86InductorBackend(saturation="safe")

    reference = quantize(model, x, backend, [x])

    assert sqnr_db(reference(x), model(x)) > 25
    assert all(is_int8 for _, is_int8 in int8_layers(reference, backend))
    check_exactness(reference, lower(reference, backend), (x,)).raise_if_inexact()
