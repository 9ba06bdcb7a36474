"""The values that quantized activations take, against the grids that calibration chose for them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from versatil_core.layer_report import ActivationRange
from versatil_passes.float_layers import FLOAT_LAYERS
from versatil_passes.graph_queries import module_path_of

PERCENTILES = (0.1, 1.0, 50.0, 99.0, 99.9)
BINS = 48
OUTLIER_RATIO = 6.0
"""A channel is an outlier if its largest magnitude is at least this many times the median channel's.

Our own rule of thumb. What such channels do to the scale of all others is described in Dettmers et
al., "LLM.int8()" (2022), section 4.
"""
_MAX_SAMPLES = 1 << 18  # of each batch; a quantile sorts
_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"


class RangeRecorder:
    """Collects the values that the quantize nodes with a fixed scale get."""

    def __init__(self, reference: GraphModule) -> None:
        """Find the nodes; ``reference`` is not changed."""
        self._seen = {
            node: _Seen(_channel_axis(node))
            for node in reference.graph.nodes
            if node.op == "call_function" and str(node.target) == _QUANTIZE
        }

    def watches(self, node: Node) -> bool:
        """Whether ``node`` is such a quantize."""
        return node in self._seen

    def observe(self, node: Node, value: torch.Tensor) -> None:
        """Look at what a quantize gets, in one batch; at its finite values."""
        if bool(torch.isfinite(value).any()):
            self._seen[node].add(value.detach(), *_grid(node))

    def ranges(self) -> tuple[ActivationRange, ...]:
        """What was seen; quantizes of one value onto one grid are one entry, with all readers."""
        merged: dict[tuple[Any, ...], list[Node]] = {}
        for node, seen in self._seen.items():
            if seen.count:
                merged.setdefault((node.args[0], *node.args[1:5]), []).append(node)
        return tuple(_range(nodes, self._seen[nodes[0]]) for nodes in merged.values())


@dataclass
class _Seen:
    axis: int | None
    count: int = 0
    clipped: int = 0
    minimum: float = float("inf")
    maximum: float = float("-inf")
    samples: list[torch.Tensor] = field(default_factory=list)
    magnitudes: torch.Tensor | None = None

    def add(self, value: torch.Tensor, low: float, high: float) -> None:
        every = value.float()
        is_finite = torch.isfinite(every)
        values = every[is_finite]
        self.count += values.numel()
        self.clipped += int(((values < low) | (values > high)).sum())
        least, most = torch.aminmax(values)
        self.minimum, self.maximum = min(self.minimum, float(least)), max(self.maximum, float(most))
        self.samples.append(_sample(values))
        if self.axis is not None and -every.dim() <= self.axis:
            magnitudes = every.abs().where(is_finite, torch.zeros(()))
            found = magnitudes.movedim(self.axis, 0).flatten(1).amax(1)
            before = self.magnitudes
            is_alike = before is not None and before.shape == found.shape
            self.magnitudes = torch.maximum(before, found) if is_alike else found  # type: ignore[arg-type]

    def outliers(self) -> tuple[int, ...]:
        if self.magnitudes is None:
            return ()
        threshold = OUTLIER_RATIO * self.magnitudes.median()
        is_outlier = (self.magnitudes >= threshold) & (threshold > 0)
        return tuple(map(int, is_outlier.nonzero().flatten()))


def _range(nodes: Iterable[Node], seen: _Seen) -> ActivationRange:
    first, *_ = nodes = [*nodes]
    _, scale, zero_point, quant_min, quant_max, *_ = first.args
    sample = torch.cat(seen.samples)
    values = torch.quantile(sample.double(), torch.tensor(PERCENTILES, dtype=torch.float64) / 100)
    counts = torch.histc(sample, BINS, seen.minimum, seen.maximum)
    return ActivationRange(
        node=first.name,
        readers=tuple(dict.fromkeys(reader for node in nodes for reader in _readers(node))),
        scale=float(scale),  # type: ignore[arg-type]
        zero_point=int(zero_point),  # type: ignore[arg-type]
        quant_min=int(quant_min),  # type: ignore[arg-type]
        quant_max=int(quant_max),  # type: ignore[arg-type]
        minimum=seen.minimum,
        maximum=seen.maximum,
        percentiles={f"{p:g}": float(v) for p, v in zip(PERCENTILES, values, strict=True)},
        clipped_share=seen.clipped / seen.count,
        histogram=tuple(map(int, counts)),
        outlier_channels=seen.outliers(),
        channels=0 if seen.magnitudes is None else len(seen.magnitudes),
    )


def _grid(node: Node) -> tuple[float, float]:
    """The values between which rounding clips nothing: half a step beyond both ends of the grid."""
    _, scale, zero_point, quant_min, quant_max, *_ = node.args
    step: Any = scale
    low: Any = quant_min
    high: Any = quant_max
    zero: Any = zero_point
    return (low - zero - 0.5) * step, (high - zero + 0.5) * step


def _sample(values: torch.Tensor) -> torch.Tensor:
    """At most `_MAX_SAMPLES` of the values, the same ones each time."""
    flat = values.flatten()
    if len(flat) <= _MAX_SAMPLES:
        return flat.clone()
    # No fixed step: it could be the number of channels.
    generator = torch.Generator().manual_seed(0)
    return flat[torch.randint(len(flat), (_MAX_SAMPLES,), generator=generator)]


def _reading_nodes(quantize: Node) -> Iterator[Node]:
    for dequantize in quantize.users:
        yield from dequantize.users


def _readers(quantize: Node) -> Iterator[str]:
    for node in _reading_nodes(quantize):
        is_layer = node.target in FLOAT_LAYERS
        yield (module_path_of(node) if is_layer else "") or node.name


def _channel_axis(quantize: Node) -> int | None:
    """Where a reading layer has its input channels; None if no reader tells."""
    axes: Mapping[str, int] = {"linear": -1, "conv1d": -2, "conv2d": -3, "conv3d": -4}
    found = [axes.get(FLOAT_LAYERS.get(node.target, "")) for node in _reading_nodes(quantize)]
    return next((axis for axis in found if axis is not None), None)
