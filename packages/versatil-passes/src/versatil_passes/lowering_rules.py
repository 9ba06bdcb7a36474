"""What an int8 lowering may do on one kind of hardware."""

from dataclasses import dataclass, field

import torch

from versatil_passes.errors import RulesError
from versatil_passes.float_layers import LINEAR_AND_CONV
from versatil_passes.saturating_pairs import SaturatingPairs

OPS = LINEAR_AND_CONV
POST_OPS = frozenset({"relu", "hardtanh", "hardswish", "silu", "gelu"})
RESIDUAL_POST_OPS = frozenset({"relu"})
KERNELS = frozenset({"onednn", "gemm"})
OPTIONAL_PASSES = frozenset({"KeepInt8"})


@dataclass(frozen=True)
class LoweringRules:
    """The forms that the int8 kernels of one hardware kind can run.

    A hardware package makes one of these; :class:`~versatil_passes.Int8Lowering` reads it and does nothing else by
    itself. Everything that a rule excludes stays as quantize/dequantize and is recorded with its reason.

    Attributes:
        machine_types: Values of ``platform.machine()``, lower case, where the kernels exist.
        ops: Operators with an int8 kernel, out of ``{"linear", "conv1d", "conv2d", "conv3d"}``.
        activation_dtypes: Dtypes of quantized activations, and of fused int8 outputs.
        weight_granularities: Out of ``{"per_channel", "per_tensor"}``; weights are always int8 with zero_point 0.
        dynamic_ops: Operators whose kernel takes activation scale and zero_point as tensors.
        post_ops: For each operator, the element-wise functions that its kernel applies to the float result, out of
            ``{"relu", "hardtanh", "hardswish", "silu", "gelu"}``.
        residual_post_ops: For each operator that can add a second tensor, the element-wise functions allowed after
            that addition, out of ``{"relu"}``. An operator that is missing here never absorbs an addition.
        allow_int8_output: Whether a kernel may write its result already quantized.
        allow_bfloat16_output: Whether a kernel may write its result rounded to bfloat16.
        saturating_pairs: How the kernels of the CPU at hand pair products up in a sum that saturates, or ``None``
            where they never do.
        kernels: ``"onednn"`` binds the layers to oneDNN's kernels for linears and convolutions
            (:class:`~versatil_passes.OneDNNKernels`); ``"gemm"`` makes each one a product of int8 matrices
            (:class:`~versatil_passes.GemmKernels`), which takes convolutions without groups, no post op but relu, and
            no int8 or bfloat16 output.
        columns_bytes_max: With ``"gemm"``, the memory that a convolution's columns may take for each image, in
            bytes; larger ones stay float. ``None`` is no limit.
        kernel_class: Name of the implementation that runs the int8 layers, such as ``"lowp_gemm:acl"``, for the
            record; empty where that is for oneDNN to decide.
        without_passes: Passes in front of the lowering that are left out, by name, out of ``{"KeepInt8"}``.

    Raises:
        RulesError: A name is none of those listed above, or ``"gemm"`` comes with post ops, or with int8 or bfloat16
            outputs.
    """

    machine_types: tuple[str, ...]
    ops: frozenset[str] = OPS
    activation_dtypes: tuple[torch.dtype, ...] = (torch.uint8,)
    weight_granularities: frozenset[str] = frozenset({"per_channel", "per_tensor"})
    dynamic_ops: frozenset[str] = frozenset({"linear"})
    post_ops: dict[str, frozenset[str]] = field(default_factory=dict)
    residual_post_ops: dict[str, frozenset[str]] = field(default_factory=dict)
    allow_int8_output: bool = True
    allow_bfloat16_output: bool = False
    saturating_pairs: SaturatingPairs | None = None
    kernels: str = "onednn"
    columns_bytes_max: int | None = None
    kernel_class: str = ""
    without_passes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse names that no lowering knows, so that a typing error does not switch a fusion off silently."""
        ops = self.ops | self.dynamic_ops | self.post_ops.keys() | self.residual_post_ops.keys()
        post_ops = frozenset().union(*self.post_ops.values())
        residual_post_ops = frozenset().union(*self.residual_post_ops.values())
        for what, given, known in (
            ("op", ops, OPS),
            ("post op", post_ops, POST_OPS),
            ("residual post op", residual_post_ops, RESIDUAL_POST_OPS),
            ("kind of kernels", {self.kernels}, KERNELS),
            ("pass to leave out", self.without_passes, OPTIONAL_PASSES),
            ("weight granularity", self.weight_granularities, {"per_channel", "per_tensor"}),
        ):
            unknown = sorted(given - known)
            if unknown:
                raise RulesError(what, unknown[0], sorted(known))
        beyond_relu = sorted(post_ops - {"relu"}) + ["add"] * bool(self.residual_post_ops)
        if self.kernels == "gemm" and beyond_relu:
            raise RulesError("post op with kernels='gemm'", beyond_relu[0], ["relu"])
        for option in ("allow_int8_output", "allow_bfloat16_output"):
            if self.kernels == "gemm" and getattr(self, option):
                what = "value with kernels='gemm'"
                raise RulesError(what, f"{option}=True", [f"{option}=False"])

    def admits_post_op(self, op: str, post_op: str, *, has_residual: bool) -> bool:
        """Whether the kernel of ``op`` applies ``post_op``, after an addition if ``has_residual``.

        Example:
            >>> rules = LoweringRules(("x86_64",), post_ops={"linear": frozenset({"relu"})})
            >>> rules.admits_post_op("linear", "relu", has_residual=False)
            True
            >>> rules.admits_post_op("linear", "relu", has_residual=True)
            False
        """
        admitted = self.residual_post_ops if has_residual else self.post_ops
        return post_op in admitted.get(op, frozenset())
