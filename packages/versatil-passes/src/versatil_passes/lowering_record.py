"""What an int8 lowering did, and what it declined and why."""

from dataclasses import dataclass, field

import torch

NOT_ANNOTATED = "the quantizer did not annotate this layer"
"""How the reason of a layer ends that nothing asked to quantize."""


@dataclass(frozen=True)
class LoweredOp:
    """One operator that now runs on an int8 kernel, or looks up int8 rows.

    Attributes:
        node: Name of the layer's node in the graph as it was before.
        module_path: Dotted path of the module it came from; ``""`` where the graph does not say.
        op: ``"linear"``, ``"conv1d"``, ``"conv2d"``, ``"conv3d"``, ``"embedding"`` or ``"embedding_bag"``.
        kernel: The kernel family, such as ``"onednn.qlinear_pointwise"``; ``"aten.embedding"`` for a lookup of int8
            rows, which is torch's own operator.
        post_ops: What the kernel also does, in order: ``"add"``, then at most one element-wise function.
        output_dtype: ``torch.float32``, or ``torch.bfloat16`` where the kernel rounds its own output, or the quantized
            dtype where it quantizes it.
        input_quant_max: ``quant_max`` of the activation's quantize; ``None`` for an embedding, whose weight alone is
            quantized.
        is_dynamic: Whether the activation's scale is computed at run time.
        replaces: Names of the nodes that the kernel stands for, in order; the last one's value is the kernel's result.
        pair_sum: The largest magnitude that two neighbouring int8 weights of the same sign, or a lone one, add up to;
            ``None`` where the rules name no :class:`~versatil_passes.SaturatingPairs`.
        pair_limit: The largest such sum for which the kernel cannot saturate; ``None`` likewise.
        columns_bytes: Where a convolution runs as a product of matrices: the memory in bytes that its columns take for
            each image.
        kernel_class: Name of the implementation that runs it, such as ``"lowp_gemm:acl"``; empty where oneDNN decides.
    """

    node: str
    module_path: str
    op: str
    kernel: str
    post_ops: tuple[str, ...]
    output_dtype: torch.dtype
    input_quant_max: int | None
    is_dynamic: bool
    replaces: tuple[str, ...]
    pair_sum: int | None = None
    pair_limit: int | None = None
    columns_bytes: int = 0
    kernel_class: str = ""

    @property
    def may_saturate(self) -> bool:
        """Whether inputs exist for which the kernel's sums saturate, so that its result is wrong."""
        return (
            self.pair_sum is not None
            and self.pair_limit is not None
            and self.pair_sum > self.pair_limit
        )

    def __str__(self) -> str:
        """What the kernel computes, such as ``"linear + add + relu -> uint8"``."""
        return f"{' + '.join((self.op, *self.post_ops))} -> {str(self.output_dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class DeclinedOp:
    """One operator that stays float.

    Attributes:
        node: Name of the node.
        module_path: Dotted path of the module it came from; ``""`` where the graph does not say.
        op: The operator's name, such as ``"conv3d"``.
        reason: Why it has no int8 kernel, in words that say what would change that.
    """

    node: str
    module_path: str
    op: str
    reason: str


@dataclass(frozen=True)
class LoweringRecord:
    """Everything one run of an int8 lowering decided, in graph order."""

    lowered: tuple[LoweredOp, ...] = field(default_factory=tuple)
    declined: tuple[DeclinedOp, ...] = field(default_factory=tuple)
