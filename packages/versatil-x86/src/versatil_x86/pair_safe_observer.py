"""The observer, and the fake quantization, of weights that cannot saturate without VNNI."""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e import FakeQuantizeBase, ObserverBase

from versatil_passes.graph_queries import constant_of
from versatil_x86.int8_weight import QuantizedWeight, put_int8_weight, put_quantize
from versatil_x86.pair_safe_weights import (
    best_of,
    candidates,
    plain_scale,
    weight_errors,
)


class PairSafePerChannelObserver(ObserverBase):
    """Quantizes a weight per output channel so that no pair of products can saturate.

    The bound and its source are those of :mod:`versatil_x86.pair_safe_weights`. Below the plain scale, which covers
    the largest pair, a few more are tried for each output channel, and the one with the least squared error is taken:
    the error of the layer's output over the calibration data, if :meth:`observe_layer` was shown any, otherwise that
    of the weight. The plain scale is one of them, so the result is never worse on that data.

    The guarantee holds for the rounded values, so this class rounds them itself: ``convert_pt2e`` calls
    :meth:`convert`.

    Args:
        activation_max: ``quant_max`` of the layer's activation.
        dtype: int8.
        quant_min: Smallest value of the dtype.
        quant_max: Largest value of the dtype.
        qscheme: Per channel, symmetric.
        ch_axis: 0.
        is_dynamic: False.
    """

    def __init__(
        self,
        activation_max: int = 255,
        dtype: torch.dtype = torch.int8,
        quant_min: int = -128,
        quant_max: int = 127,
        qscheme: torch.qscheme = torch.per_channel_symmetric,
        ch_axis: int = 0,
        *,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(dtype, is_dynamic)
        self.activation_max = activation_max
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.qscheme = qscheme
        self.ch_axis = ch_axis
        self._weight: torch.Tensor | None = None
        self._candidates: list[QuantizedWeight] = []
        self._output_errors: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Remember the weight, and return it."""
        self._weight = x.detach()
        return x

    def observe_layer(
        self, layer: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Add up the squared error that each candidate makes at the layer's output.

        Args:
            layer: ``aten.linear`` or a convolution.
            args: What it is called with: activation, weight, and the rest.
            kwargs: As well.
        """
        activation, weight, _, *rest = (*args, None) if len(args) == 2 else args
        rest_kwargs = {name: value for name, value in kwargs.items() if name != "bias"}
        if not self._candidates:
            self._candidates = candidates(weight, self.activation_max)
        errors = []
        for candidate in self._candidates:
            # Linear in the weight: the error's output is the output's error.
            error = (candidate.dequantize() - weight).to(weight.dtype)
            output = layer(activation, error, None, *rest, **rest_kwargs)
            channel = output.dim() - weight.dim() + 1
            # Of one sample, there is nothing but the channels.
            squares = output.square().movedim(channel, 0).unsqueeze(-1).flatten(1)
            errors.append(squares.sum(1, dtype=torch.float64))
        total = torch.stack(errors)
        self._output_errors = total if self._output_errors is None else self._output_errors + total

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales, float32 ``[out_channels]``, and as many zeros.

        Raises:
            RuntimeError: No weight was observed.
        """
        if self._weight is None:
            raise RuntimeError("the weight has not been observed: run the prepared model first")
        scale = self.quantize(self._weight).scale
        return scale, torch.zeros_like(scale, dtype=torch.int64)

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """Quantize a weight as :meth:`convert` does.

        Args:
            weight: Float ``[out_channels, in_channels / groups, *kernel]``.
        """
        # Made anew: should the weight be another one than during calibration, the bound holds all the same.
        quantized = candidates(weight, self.activation_max)
        errors = self._output_errors
        return best_of(quantized, weight_errors(weight, quantized) if errors is None else errors)

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Put the int8 weight and its dequantize in the place of the observer; ``convert_pt2e`` calls this."""
        weight_node = observer_node.args[0]
        with torch.no_grad():
            weight = _constant_value(weight_node)
            quantized = self.quantize(weight)
        name = str(weight_node.target) if isinstance(weight_node, Node) else ""
        out_dtype = None if weight.dtype is torch.float32 else weight.dtype
        put_int8_weight(model, observer_node, quantized, name, out_dtype)


class PairSafePerChannelFakeQuantize(FakeQuantizeBase):
    """Fake quantization of a weight under the same bound, so that training sees what the kernel will compute.

    The scale is the plain one and follows the weight: nothing is clipped. ``disable_observer`` keeps the scale of
    each channel whose weights do not outgrow it.

    Args:
        activation_max: ``quant_max`` of the layer's activation.
        dtype: int8.
        quant_min: Smallest value of the dtype.
        quant_max: Largest value of the dtype.
        qscheme: Per channel, symmetric.
        ch_axis: 0.
        is_dynamic: False.

    Attributes:
        scale: float32 ``[out_channels]``; empty before the first call.
    """

    scale: torch.Tensor

    def __init__(
        self,
        activation_max: int = 255,
        dtype: torch.dtype = torch.int8,
        quant_min: int = -128,
        quant_max: int = 127,
        qscheme: torch.qscheme = torch.per_channel_symmetric,
        ch_axis: int = 0,
        *,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__()
        self.activation_max = activation_max
        self.dtype = dtype
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.qscheme = qscheme
        self.ch_axis = ch_axis
        self.is_dynamic = is_dynamic
        self.register_buffer("scale", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the int8 weight will stand for, in the shape and dtype of ``x``."""
        self.scale = self._scale_for(x.detach())
        if self.fake_quant_enabled[0] == 0:
            return x
        zero_point = torch.zeros_like(self.scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(
            x, self.scale, zero_point, self.ch_axis, self.quant_min, self.quant_max
        )

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales, float32 ``[out_channels]``, and as many zeros."""
        return self.scale, torch.zeros_like(self.scale, dtype=torch.int64)

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Put a quantize and a dequantize in the place of this module; ``convert_pt2e`` calls this.

        The scale is that of the weight as it is now: the optimizer has moved it since the last call. The weight
        itself stays float here: torchao still has to fold a batch norm into it.
        """
        with torch.no_grad():
            self.scale = self._scale_for(_constant_value(observer_node.args[0]))
        put_quantize(model, observer_node, *self.calculate_qparams())

    def _scale_for(self, weight: torch.Tensor) -> torch.Tensor:
        scale = plain_scale(weight, self.activation_max)
        is_fixed = self.observer_enabled[0] == 0 and self.scale.shape == scale.shape
        return torch.maximum(scale, self.scale) if is_fixed else scale

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        saved = state_dict.get(prefix + "scale")
        if isinstance(saved, torch.Tensor):
            self.scale = torch.empty_like(saved)  # its length is not known before the first call
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _constant_value(node: Any) -> torch.Tensor:
    """Compute a node that depends on nothing but constants, such as a weight times a batch norm's factor."""
    value = constant_of(node)
    if value is not None:
        return value
    if not isinstance(node, Node) or node.op != "call_function":
        raise RuntimeError(f"{node} is no constant of the model: only such weights are int8")
    args, kwargs = map_arg((node.args, node.kwargs), _constant_value)
    result: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator] # a function
    return result
