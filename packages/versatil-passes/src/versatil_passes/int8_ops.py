"""The neutral int8 operators: what a quantized linear or convolution computes, before any kernel is chosen.

:class:`~versatil_passes.Int8Lowering` writes them into a graph, and a hardware's kernel pass replaces them. In
between they are opaque to Inductor, which is the point: no pattern that another package registered can match them,
so none can fuse them in a way that writes to a caller's tensor or drops a clamp.

Both compute, in this order,

    y = op((qx - x_zero_point) * x_scale, weight * w_scale) + bias      float32
    y = y + (other - other_zero_point) * other_scale                    where ``other`` is given
    y = post_op(y)
    y = clamp(round(y / output_scale) + output_zero_point, output_quant_min, output_quant_max)
                                                                        where ``output_dtype`` is no float
    y = y.to(bfloat16)                                                  where ``output_dtype`` is that

with ``qx`` uint8 or int8, ``weight`` int8 with zero_point 0, ``w_scale`` float32 of one element or one per output
channel, ``other`` float32, bfloat16 or quantized, of the output's shape. ``aten.conv`` gives the meaning of the convolution's
arguments; one, two or three spatial dimensions follow from the shape of ``weight``.
"""

import functools
import threading
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.fx import Node

from versatil_passes.graph_queries import constant_of

_TAIL = (
    "Tensor? other, float other_scale, int other_zero_point, str post_op, Scalar?[] post_op_args, "
    "float output_scale, int output_zero_point, int output_quant_min, int output_quant_max, ScalarType output_dtype"
)
_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int groups"
_STATIC = "Tensor qx, float x_scale, int x_zero_point, Tensor weight, Tensor w_scale, Tensor? bias"
_DYNAMIC = (
    "Tensor qx, Tensor x_scale, Tensor x_zero_point, Tensor weight, Tensor w_scale, Tensor? bias"
)
_SCHEMAS = (
    f"qlinear({_STATIC}, {_TAIL}) -> Tensor",
    f"qlinear.tensor({_DYNAMIC}, {_TAIL}) -> Tensor",
    f"qconv({_STATIC}, {_GEOMETRY}, {_TAIL}) -> Tensor",
    f"qconv.tensor({_DYNAMIC}, {_GEOMETRY}, {_TAIL}) -> Tensor",
)


@dataclass(frozen=True)
class Int8Call:
    """The arguments of one neutral operator, by name; nodes of a graph, or values.

    ``geometry`` is ``(stride, padding, dilation, groups)`` for a convolution and ``None`` for a linear.
    """

    qx: Any
    x_scale: Any
    x_zero_point: Any
    weight: Any
    w_scale: Any
    bias: Any
    geometry: tuple[list[int], list[int], list[int], int] | None = None
    other: Any = None
    other_scale: float = 1.0
    other_zero_point: int = 0
    post_op: str = "none"
    post_op_args: tuple[Any, ...] = ()
    output_scale: float = 1.0
    output_zero_point: int = 0
    output_quant_min: int = 0
    output_quant_max: int = 0
    output_dtype: torch.dtype = torch.float32

    @property
    def is_dynamic(self) -> bool:
        """Whether scale and zero_point of the activation are tensors."""
        return not isinstance(self.x_scale, (int, float))

    @property
    def is_one_by_one(self) -> bool:
        """Whether it is a convolution whose kernel covers one position."""
        weight = self.weight if isinstance(self.weight, torch.Tensor) else constant_of(self.weight)
        return (
            self.geometry is not None
            and weight is not None
            and all(size == 1 for size in weight.shape[2:])
        )

    @property
    def has_int8_output(self) -> bool:
        """Whether the result is quantized."""
        return not self.output_dtype.is_floating_point

    @property
    def is_output_narrow(self) -> bool:
        """Whether the output's quant range is narrower than its dtype, as with ``reduce_range``."""
        if not self.has_int8_output:
            return False
        limits = torch.iinfo(self.output_dtype)
        return (self.output_quant_min, self.output_quant_max) != (limits.min, limits.max)

    @property
    def target(self) -> torch._ops.OpOverload:
        """The operator that takes these arguments."""
        packet = operators().qlinear if self.geometry is None else operators().qconv
        target: torch._ops.OpOverload = packet.tensor if self.is_dynamic else packet.default
        return target

    def args(self) -> tuple[Any, ...]:
        """The arguments in the order of the schema."""
        head = (self.qx, self.x_scale, self.x_zero_point, self.weight, self.w_scale, self.bias)
        tail = (
            *(
                self.other,
                self.other_scale,
                self.other_zero_point,
                self.post_op,
                list(self.post_op_args),
            ),
            *(
                self.output_scale,
                self.output_zero_point,
                self.output_quant_min,
                self.output_quant_max,
            ),
            self.output_dtype,
        )
        return (*head, *(self.geometry or ()), *tail)

    @classmethod
    def from_args(cls, args: tuple[Any, ...]) -> "Int8Call":
        """Inverse of :meth:`args`: six come first, ten last, and a geometry of four stands between them or not."""
        head, geometry, tail = args[:6], args[6:-10], args[-10:]
        names = [field.name for field in fields(cls) if field.name != "geometry"]
        values = dict(zip(names, (*head, *tail), strict=True))
        if geometry:
            stride, padding, dilation, groups = geometry
            values["geometry"] = (list(stride), list(padding), list(dilation), groups)
        return cls(**{**values, "post_op_args": tuple(values["post_op_args"])})


def is_int8_op(node: Node) -> bool:
    """Whether ``node`` calls one of the neutral operators."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "versatil"
    )


def operators() -> Any:
    """The ``torch.ops.versatil`` namespace, defined at the first call so that an import changes nothing."""
    with _defining:  # the cache alone lets two threads that come first both run it
        _define()
    return torch.ops.versatil


_defining = threading.Lock()


@functools.cache
def _define() -> tuple[Any, ...]:
    """Define the operators once; a library lives as long as the tuple that is cached here."""
    make_library: Any = torch.library.Library  # untyped in torch
    library = make_library("versatil", "DEF")
    for schema in _SCHEMAS:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.split("(", 1)[0]
        library.impl(name, _run, "CPU")
        torch.library.register_fake(f"versatil::{name}", _fake, lib=library)
    return (library,)


def _run(*args: Any) -> torch.Tensor:
    from versatil_passes.onednn_kernels import run  # the kernels import this module

    return run(Int8Call.from_args(args))


def _fake(*args: Any) -> torch.Tensor:
    """Shape, dtype and strides of the result: contiguous for a linear, channels last for a convolution."""
    call = Int8Call.from_args(args)
    qx: torch.Tensor = call.qx
    if call.geometry is None:
        return qx.new_empty((*qx.shape[:-1], call.weight.shape[0]), dtype=call.output_dtype)
    spatial = [
        (size + 2 * pad - step * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, pad, step in zip(
            qx.shape[2:], call.weight.shape[2:], *call.geometry[:3], strict=True
        )
    ]
    shape = (qx.shape[0], *spatial, call.weight.shape[0])
    return qx.new_empty(shape, dtype=call.output_dtype).movedim(-1, 1)
