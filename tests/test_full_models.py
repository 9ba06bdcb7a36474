"""BERT-base, ResNet-50 and ViT-B/16, as transformers configures them, are int8 on Arm throughout.

Random weights, and small inputs: what is quantized and lowered doesn't depend on either.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from versatil_arm import ArmInductorBackend
from versatil_core import audit, lower, quantize

transformers = importlib.import_module("transformers")  # has no types that help
FLOAT = {"scaled_dot_product_attention", "matmul"}


class FirstOutput(torch.nn.Module):
    """Returns only the first output, a tensor, of a model that returns several."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass the input on; the shapes are the model's own."""
        output: torch.Tensor = self.inner(x)[0]
        return output


def bert_base() -> tuple[torch.nn.Module, torch.Tensor]:
    """A text of 16 tokens."""
    model = transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)
    return model, torch.randint(1000, (1, 16))


def resnet50() -> tuple[torch.nn.Module, torch.Tensor]:
    """An image of 64 by 64."""
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig())
    return model, torch.randn(1, 3, 64, 64)


def vit_b16() -> tuple[torch.nn.Module, torch.Tensor]:
    """An image of 32 by 32: the size decides how many patches there are, nothing else."""
    config = transformers.ViTConfig(image_size=32)
    return transformers.ViTModel(config, add_pooling_layer=False), torch.randn(1, 3, 32, 32)


MODELS: list[tuple[Callable[[], tuple[torch.nn.Module, torch.Tensor]], dict[str, int]]] = [
    (bert_base, {"linear": 72, "embedding": 3}),
    (resnet50, {"conv2d": 53, "linear": 1}),
    (vit_b16, {"conv2d": 1, "linear": 72}),
]


@pytest.mark.parametrize(("make", "layers"), MODELS, ids=[make.__name__ for make, _ in MODELS])
def test_every_linear_convolution_and_embedding_is_int8(
    make: Callable[[], tuple[torch.nn.Module, torch.Tensor]],
    layers: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = make()
    kinds = {
        torch.nn.Linear: "linear",
        torch.nn.Conv2d: "conv2d",
        torch.nn.Embedding: "embedding",
    }
    in_model = Counter(kinds[type(part)] for part in model.modules() if type(part) in kinds)
    assert in_model == layers
    backend = ArmInductorBackend()

    reference = quantize(FirstOutput(model).eval(), x, backend, [x])

    result = audit(reference, backend)
    int8 = [layer for layer in result.layers if layer.is_int8]
    assert Counter(layer.op for layer in int8) == layers
    assert {layer.op for layer in result.float_layers} <= FLOAT
    products = [layer for layer in int8 if layer.op != "embedding"]
    assert {layer.kernel_class for layer in products} == {"lowp_gemm:acl"}

    # Binding them to their kernel takes no Arm CPU.
    monkeypatch.setattr(sys.modules["versatil_core.lower"], "check_host", lambda _: None)
    targets = [str(node.target) for node in lower(reference, backend).graph.nodes]
    assert targets.count("onednn.qlinear_pointwise.default") == len(products)
    assert reference(x).isfinite().all()
