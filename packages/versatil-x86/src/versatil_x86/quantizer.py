"""What to quantize for x86, and how: torchao's recipe, with weights that can't saturate if asked for."""

from dataclasses import replace
from typing import Any

import torch
from torchao.quantization.pt2e.quantizer import QuantizationConfig

from versatil_core.layer_quantizer import LayerQuantizer
from versatil_core.torchao_guard import load_quantizer_module
from versatil_x86.pair_safe_observer import (
    PairSafePerChannelFakeQuantize,
    PairSafePerChannelObserver,
)
from versatil_x86.saturation import Saturation

aten = torch.ops.aten

# The layers whose kernel adds an int8 tensor to its result.
_ADDING_LAYERS = frozenset({aten.conv2d.default, aten.conv2d.padding})


class X86Quantizer(LayerQuantizer):
    """Annotates linear layers and convolutions, and what int8 passes through unchanged.

    Args:
        module_path: Annotate only inside this module; ``""`` is the whole model.
        is_dynamic: Measure the scale of activations at every call. Only layers are annotated
            then: nothing else has an int8 kernel with a measured scale.
        is_qat: Insert fake quantization for training.
        saturation: What keeps products from saturating on a CPU without VNNI: ``"safe"`` chooses
            the weights' scales for it, ``"reduce_range"`` uses 7 of the 8 bits of activations,
            ``"ignore"`` does nothing.
    """

    def __init__(
        self,
        module_path: str = "",
        *,
        is_dynamic: bool = False,
        is_qat: bool = False,
        saturation: Saturation = "ignore",
    ) -> None:
        recipe = load_quantizer_module("x86_inductor_quantizer")
        config: QuantizationConfig = recipe.get_default_x86_inductor_quantization_config(
            is_qat=is_qat, is_dynamic=is_dynamic, reduce_range=saturation == "reduce_range"
        )
        if saturation == "safe":
            config = _with_safe_weights(config)
        super().__init__(config, module_path, is_dynamic=is_dynamic, adding_layers=_ADDING_LAYERS)


def _with_safe_weights(config: QuantizationConfig) -> QuantizationConfig:
    """The same recipe with weights for which no pair of products saturates."""
    activation, weight = config.input_activation, config.weight
    assert activation is not None
    assert weight is not None
    observer: Any = PairSafePerChannelFakeQuantize if config.is_qat else PairSafePerChannelObserver
    constructor = observer.with_args(activation_max=activation.quant_max)
    return replace(config, weight=replace(weight, observer_or_fake_quant_ctr=constructor))
