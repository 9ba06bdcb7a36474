"""How activations and weights are quantized for Arm."""

from typing import TYPE_CHECKING, Any

import torch

from versatil_arm.options import ActivationDtype, check_activation_dtype

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import QuantizationConfig

_DTYPES: dict[ActivationDtype, torch.dtype] = {"int8": torch.int8, "uint8": torch.uint8}


def get_arm_inductor_quantization_config(
    is_qat: bool = False,
    is_dynamic: bool = False,
    is_per_channel: bool = True,
    activation_dtype: str = "int8",
) -> "QuantizationConfig":
    """Return the recipe: 8-bit affine activations, int8 symmetric weights, float32 results.

    Args:
        is_qat: Use fake quantization for training instead of observers.
        is_dynamic: Measure the scale of activations at every call.
        is_per_channel: One weight scale for each output channel; else one for the whole weight.
        activation_dtype: ``"int8"`` (s8:s8:f32) or ``"uint8"`` (u8:s8:f32).

    Returns:
        A configuration as torchao's quantizers take it.

    Raises:
        BackendOptionError: ``activation_dtype`` has another value.
    """
    # Here, since torchao takes seconds to import.
    from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

    dtype = _DTYPES[check_activation_dtype(activation_dtype)]
    limits = torch.iinfo(dtype)
    activation = QuantizationSpec(
        dtype=dtype,
        quant_min=limits.min,
        quant_max=limits.max,
        qscheme=torch.per_tensor_affine,
        is_dynamic=is_dynamic,
        observer_or_fake_quant_ctr=_activation_observer(is_qat=is_qat, is_dynamic=is_dynamic),
    )
    weight = QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_channel_symmetric if is_per_channel else torch.per_tensor_symmetric,
        ch_axis=0 if is_per_channel else None,
        observer_or_fake_quant_ctr=_weight_observer(is_qat=is_qat, is_per_channel=is_per_channel),
    )
    return QuantizationConfig(activation, activation, weight, None, is_qat)


def _activation_observer(*, is_qat: bool, is_dynamic: bool) -> Any:
    from torchao.quantization import pt2e

    if is_qat and is_dynamic:
        # The range of each call is its own: nothing is averaged.
        observer = pt2e.MovingAverageMinMaxObserver.with_args(averaging_constant=1)
        return pt2e.FakeQuantize.with_args(observer=observer)
    if is_qat:
        return pt2e.FusedMovingAvgObsFakeQuantize
    return pt2e.PlaceholderObserver if is_dynamic else pt2e.HistogramObserver


def _weight_observer(*, is_qat: bool, is_per_channel: bool) -> Any:
    from torchao.quantization import pt2e

    if not is_qat:
        return pt2e.PerChannelMinMaxObserver if is_per_channel else pt2e.MinMaxObserver
    observer = (
        pt2e.MovingAveragePerChannelMinMaxObserver
        if is_per_channel
        else pt2e.MovingAverageMinMaxObserver
    )
    return pt2e.FusedMovingAvgObsFakeQuantize.with_args(observer=observer)
