"""The models that the benchmark compares on: architectures that people really serve.

ResNet-50, BERT-base and ViT-B/16 come from their ``transformers`` configs with seeded random
weights; their latency and kernels are the real ones, their accuracy means nothing. MiniLM has
real weights and real sentences. The digits CNN is trained on real images, in seconds; it is too
small to time, and only its numbers are compared.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from versatil_core.demo_digits import digits_subject
from versatil_core.demo_minilm import minilm_subject
from versatil_core.demo_subject import Subject
from versatil_core.progress import StageProgress

transformers = importlib.import_module("transformers")  # has no types that help
CALIBRATION_BATCHES = 4
HELD_OUT_BATCHES = 8


@dataclass(frozen=True)
class BenchModel:
    """A float model in eval mode, with its data.

    Attributes:
        model: Returns one float tensor.
        example: One batch of inputs to time; the first of ``held_out``.
        calibration: Batches to quantize with.
        held_out: Batches to judge by, none of them in ``calibration``.
    """

    model: nn.Module
    example: tuple[torch.Tensor, ...]
    calibration: tuple[tuple[torch.Tensor, ...], ...]
    held_out: tuple[tuple[torch.Tensor, ...], ...]


class FirstOutput(nn.Module):
    """Returns only the first output, a tensor, of a model that returns several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Pass the inputs on; the shapes are the model's own."""
        output: torch.Tensor = self.inner(*inputs)[0]
        return output


def resnet50() -> BenchModel:
    """ResNet-50, one image of 224 by 224."""
    config = transformers.ResNetConfig()
    return _seeded(lambda: transformers.ResNetForImageClassification(config), _image)


def vit_b16() -> BenchModel:
    """ViT-B/16, one image of 224 by 224."""
    return _seeded(
        lambda: transformers.ViTModel(transformers.ViTConfig(), add_pooling_layer=False), _image
    )


def bert_base() -> BenchModel:
    """BERT-base, one text of 128 tokens."""
    config = transformers.BertConfig()

    def tokens() -> tuple[torch.Tensor, ...]:
        return (torch.randint(config.vocab_size, (1, 128)),)

    return _seeded(lambda: transformers.BertModel(config, add_pooling_layer=False), tokens)


def minilm() -> BenchModel:
    """all-MiniLM-L6-v2 with its weights, eight sentences."""
    return _demo(minilm_subject(StageProgress(None)))


def digits() -> BenchModel:
    """The demo's CNN, 64 images."""
    return _demo(digits_subject(StageProgress(None)))


MODELS: dict[str, Callable[[], BenchModel]] = {
    "resnet50": resnet50,
    "bert-base": bert_base,
    "vit-b16": vit_b16,
    "minilm": minilm,
}


def _demo(subject: Subject) -> BenchModel:
    calibration = subject.calibration[:CALIBRATION_BATCHES]
    return BenchModel(subject.model, subject.held_out[0], calibration, subject.held_out)


def _image() -> tuple[torch.Tensor, ...]:
    return (torch.randn(1, 3, 224, 224),)


def _seeded(
    make_model: Callable[[], Any], make_batch: Callable[[], tuple[torch.Tensor, ...]]
) -> BenchModel:
    torch.manual_seed(0)  # each flow makes the model in a process of its own
    model = FirstOutput(make_model()).eval()
    example, *calibration = [make_batch() for _ in range(1 + CALIBRATION_BATCHES)]
    held_out = (example, *(make_batch() for _ in range(HELD_OUT_BATCHES - 1)))
    return BenchModel(model, example, tuple(calibration), held_out)
