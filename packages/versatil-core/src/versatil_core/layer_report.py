"""What a report says of one layer, and of one quantized activation."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ActivationRange", "KernelRun", "LayerAccuracy", "LayerReport"]


@dataclass(frozen=True)
class KernelRun:
    """A kernel that really ran, as the library itself said.

    Attributes:
        library: ``"onednn"`` or ``"mkl"``.
        implementation: Such as ``"brg_matmul:avx512_core_vnni"``.
        primitive: Such as ``"matmul"``, ``"convolution"`` or ``"gemm"``.
        dtypes: Of source, weights and result, such as ``"u8:s8:f32"``.
        seconds: The least of the traced runs.
    """

    library: str
    implementation: str
    primitive: str
    dtypes: str
    seconds: float

    @property
    def is_int8(self) -> bool:
        """Whether it multiplies 8-bit integers."""
        return self.dtypes.startswith(("u8:s8", "s8:s8", "s8:u8", "u8:u8"))


@dataclass(frozen=True)
class LayerAccuracy:
    """Where the error of one layer comes from; see :mod:`versatil_core.layer_accuracy`.

    Attributes:
        introduced_db: SQNR of the reference's layer against the float layer, both fed the float
            model's values: the error that this layer adds. ``inf`` where equal.
        accumulated_db: SQNR of the reference's layer against the float layer, each in its own
            model: the error that has come together up to here.
        is_exact: Whether the int8 kernel gives what the reference's layer does, fed the same.
            None where there is no kernel of ours, so that the reference's own operator runs.
        exactness: How close it is, in words: ``"137.2 dB"``, ``"equal"``, ``"1 step in 0.01 %"``.
    """

    introduced_db: float
    accumulated_db: float
    is_exact: bool | None
    exactness: str


@dataclass(frozen=True)
class LayerReport:
    """One linear, convolution, matrix product, embedding or recurrent layer.

    Attributes:
        module_path: Dotted path as in ``named_modules()``; ``""`` where the graph does not say.
        op: ``"linear"``, ``"conv2d"``, ``"embedding"`` and so on.
        node: Its node in the reference's graph.
        input_shape: Of its first input, in the first batch.
        weight_shape: Of its second input or weight; empty if it has none.
        output_shape: Of its result.
        is_int8: Whether an int8 kernel runs it.
        post_ops: What the kernel also does, such as ``("add", "relu")``.
        output_dtype: Dtype that the kernel writes; None for a float layer.
        reason: Why the layer stays float and what would change that; None for an int8 layer.
        may_saturate: Whether inputs exist for which the kernel's sums saturate on this CPU.
        is_joined: Whether its input comes from the layer before as int8, with no float between.
        int8_run: The kernel that ran it in the quantized model; None where none was seen.
        float_run: The kernel that ran it in the float model, compiled.
        accuracy: Its errors; None if accuracy wasn't measured, or the float model has no such layer.
    """

    module_path: str
    op: str
    node: str
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    is_int8: bool
    post_ops: tuple[str, ...]
    output_dtype: str | None
    reason: str | None
    may_saturate: bool = False
    is_joined: bool = False
    int8_run: KernelRun | None = None
    float_run: KernelRun | None = None
    accuracy: LayerAccuracy | None = None

    @property
    def name(self) -> str:
        """Its module path, or its node where there is none."""
        return self.module_path or self.node

    @property
    def speedup(self) -> float | None:
        """Seconds of the float kernel / seconds of the int8 kernel; None unless both were seen."""
        if self.int8_run is None or self.float_run is None or not self.int8_run.seconds:
            return None
        return self.float_run.seconds / self.int8_run.seconds


@dataclass(frozen=True)
class ActivationRange:
    """The values that one quantized activation takes in the float model, against its grid.

    Attributes:
        node: The quantize node in the reference's graph.
        readers: Names of the layers that read it.
        scale: Step of the grid.
        zero_point: Integer that stands for 0.
        quant_min: Smallest integer.
        quant_max: Largest integer.
        minimum: Smallest value seen.
        maximum: Largest value seen.
        percentiles: Percent -> value, for 0.1, 1, 50, 99 and 99.9.
        clipped_share: Share of the values outside the grid.
        histogram: Counts of the values in equal bins from ``minimum`` to ``maximum``.
        outlier_channels: Channels with values far larger than those of the others.
        channels: How many channels there are; 0 where the tensor has no axis of channels.
    """

    node: str
    readers: tuple[str, ...]
    scale: float
    zero_point: int
    quant_min: int
    quant_max: int
    minimum: float
    maximum: float
    percentiles: Mapping[str, float]
    clipped_share: float
    histogram: tuple[int, ...]
    outlier_channels: tuple[int, ...] = ()
    channels: int = 0

    @property
    def grid_low(self) -> float:
        """Smallest value that the grid holds."""
        return (self.quant_min - self.zero_point) * self.scale

    @property
    def grid_high(self) -> float:
        """Largest value that the grid holds."""
        return (self.quant_max - self.zero_point) * self.scale

    @property
    def used_share(self) -> float:
        """Share of the grid between the smallest and the largest value seen."""
        width = self.grid_high - self.grid_low
        low, high = max(self.minimum, self.grid_low), min(self.maximum, self.grid_high)
        return max(0.0, high - low) / width if width > 0 else 0.0
