"""BERT, ResNet and ViT, as transformers builds them: every linear, embedding and ungrouped convolution is int8."""

from typing import Any

import pytest
import torch

from versatil_arm import ArmInductorBackend
from versatil_core import audit, lower, quantize, sqnr_db

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: `pip install transformers`"
)
# What float layers these models have: attention multiplies two activations.
NOT_LAYERS = {"matmul", "scaled_dot_product_attention"}


class Output(torch.nn.Module):
    """The model with one tensor as its result."""

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self.model(x), self.name)


def bert() -> tuple[torch.nn.Module, torch.Tensor, int]:
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=37, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    return Output(model, "logits"), torch.randint(0, 99, (2, 16)), 2 * 6 + 2


def resnet() -> tuple[torch.nn.Module, torch.Tensor, int]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_labels=5
    )
    model = transformers.ResNetForImageClassification(config)
    # The stem, three of each of five blocks, three shortcuts, the classifier.
    return Output(model, "logits"), torch.randn(2, 3, 64, 64), 1 + 15 + 3 + 1


def vit() -> tuple[torch.nn.Module, torch.Tensor, int]:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
        image_size=32, patch_size=8, num_labels=5,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    # The patches are a convolution of 8x8 with stride 8.
    return Output(model, "logits"), torch.randn(2, 3, 32, 32), 1 + 2 * 6 + 1


MODELS = {"bert": bert, "resnet": resnet, "vit": vit}


def of(name: str) -> tuple[torch.nn.Module, torch.Tensor, int]:
    torch.manual_seed(0)
    model, x, layers = MODELS[name]()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]
    return model.eval(), x, layers


@pytest.mark.portable
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("options", "strict"),
    [
        ({}, False),
        ({"is_per_channel": False, "activation_dtype": "uint8"}, True),
        ({"is_dynamic": True}, False),
    ],
    ids=["channel", "tensor-uint8-strict", "dynamic"],
)
def test_every_layer_is_int8(name: str, options: dict[str, Any], *, strict: bool) -> None:
    model, x, layers = of(name)
    backend = ArmInductorBackend(**options)
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    assert sum(isinstance(module, kinds) for module in model.modules()) == layers

    reference = quantize(model, x, backend, None if backend.is_dynamic else [x], strict=strict)

    result = audit(reference, backend)
    lookups = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    products = [layer for layer in result.layers if layer.is_int8 and layer.op != "embedding"]
    assert len(products) == layers
    assert result.int8_count == layers + len(lookups)
    assert {layer.op for layer in result.float_layers} <= NOT_LAYERS
    assert {layer.kernel_class for layer in products} == {"lowp_gemm:acl"}
    assert sqnr_db(reference(x), model(x)) > 10


@pytest.mark.portable
@pytest.mark.usefixtures("any_host")
@pytest.mark.parametrize("name", MODELS)
def test_the_whole_model_can_be_lowered(name: str) -> None:
    """Numerics of the parts are judged in test_property.py and on Arm; here, that they fit together."""
    model, x, layers = of(name)
    backend = ArmInductorBackend()
    reference = quantize(model, x, backend, [x])

    lowered = lower(reference, backend)

    targets = [str(node.target) for node in lowered.graph.nodes]
    assert targets.count("onednn.qlinear_pointwise.default") == layers
    assert lowered(x).shape == model(x).shape
