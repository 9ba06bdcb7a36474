"""The recipe, for every combination of its parameters."""

import inspect
import itertools
from typing import Any

import pytest
import torch

from versatil_arm import get_arm_inductor_quantization_config
from versatil_core import BackendOptionError

# (is_qat, is_dynamic) -> the observer of activations
ACTIVATIONS = {
    (False, False): "HistogramObserver",
    (False, True): "PlaceholderObserver",
    (True, False): "FusedMovingAvgObsFakeQuantize",
    (True, True): "FakeQuantize",
}
# (is_qat, is_per_channel) -> the observer of weights
WEIGHTS = {
    (False, True): "PerChannelMinMaxObserver",
    (False, False): "MinMaxObserver",
    (True, True): "FusedMovingAvgObsFakeQuantize",
    (True, False): "FusedMovingAvgObsFakeQuantize",
}
RANGES = {"int8": (torch.int8, -128, 127), "uint8": (torch.uint8, 0, 255)}


def test_the_name_and_parameters_of_the_field() -> None:
    parameters = inspect.signature(get_arm_inductor_quantization_config).parameters

    assert {name: p.default for name, p in parameters.items()} == {
        "is_qat": False,
        "is_dynamic": False,
        "is_per_channel": True,
        "activation_dtype": "int8",
    }


@pytest.mark.parametrize("dtype", sorted(RANGES))
@pytest.mark.parametrize(
    ("is_qat", "is_dynamic", "is_per_channel"), [*itertools.product((False, True), repeat=3)]
)
def test_every_combination(
    dtype: str, *, is_qat: bool, is_dynamic: bool, is_per_channel: bool
) -> None:
    config: Any = get_arm_inductor_quantization_config(
        is_qat=is_qat,
        is_dynamic=is_dynamic,
        is_per_channel=is_per_channel,
        activation_dtype=dtype,
    )

    activation, weight = config.input_activation, config.weight
    assert (activation.dtype, activation.quant_min, activation.quant_max) == RANGES[dtype]
    assert activation.qscheme is torch.per_tensor_affine
    assert activation.is_dynamic is is_dynamic
    assert config.output_activation is activation
    assert config.bias is None
    assert config.is_qat is is_qat

    assert (weight.dtype, weight.quant_min, weight.quant_max) == RANGES["int8"]
    assert not weight.is_dynamic
    if is_per_channel:
        assert weight.qscheme is torch.per_channel_symmetric
        assert weight.ch_axis == 0
    else:
        assert weight.qscheme is torch.per_tensor_symmetric
        assert weight.ch_axis is None

    assert observer_name(activation) == ACTIVATIONS[is_qat, is_dynamic]
    assert observer_name(weight) == WEIGHTS[is_qat, is_per_channel]


@pytest.mark.parametrize("is_per_channel", [True, False])
def test_fake_quantization_of_weights_measures_in_their_granularity(
    *, is_per_channel: bool
) -> None:
    config: Any = get_arm_inductor_quantization_config(is_qat=True, is_per_channel=is_per_channel)

    fake = config.weight.observer_or_fake_quant_ctr(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=config.weight.qscheme,
        **({"ch_axis": 0} if is_per_channel else {}),
    )
    fake(torch.tensor([[1.0, -1.0], [8.0, 4.0]]))

    scale, zero_point = fake.calculate_qparams()  # what converting takes
    wanted = [2 / 255, 16 / 255] if is_per_channel else [16 / 255]
    torch.testing.assert_close(scale, torch.tensor(wanted))
    assert not zero_point.any()


@pytest.mark.parametrize("value", ["s8", "float32", "INT8", ""])
def test_another_dtype_is_refused_by_name(value: str) -> None:
    with pytest.raises(BackendOptionError, match="int8, uint8") as error:
        get_arm_inductor_quantization_config(activation_dtype=value)

    assert error.value.backend == "arm_inductor"
    assert error.value.option == "activation_dtype"
    assert error.value.value == value


def observer_name(spec: Any) -> str:
    """The class behind a constructor, or behind ``with_args``."""
    made = spec.observer_or_fake_quant_ctr()
    return type(made).__name__
