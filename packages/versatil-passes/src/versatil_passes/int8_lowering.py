"""Find quantized linears and convolutions in an exported graph, and make each one int8 operator."""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from versatil_passes._torch_compat import same_shape
from versatil_passes.bfloat16_casts import is_cast
from versatil_passes.float_layers import (
    ADVICE,
    CONVOLUTIONS,
    FLOAT_LAYERS,
    LINEAR_AND_CONV,
    conv_geometry,
    conv_groups,
    post_op_of,
)
from versatil_passes.gemm_kernels import GemmKernels, columns_bytes
from versatil_passes.graph_queries import (
    args_of,
    constant_of,
    is_written,
    module_path_of,
    node_order,
    value_of,
)
from versatil_passes.int8_chain import Int8Chain, emit_int8_op
from versatil_passes.int8_embedding import EMBEDDINGS, lower_embedding
from versatil_passes.int8_ops import Int8Call
from versatil_passes.lowering_record import NOT_ANNOTATED, DeclinedOp, LoweredOp, LoweringRecord
from versatil_passes.lowering_rules import LoweringRules
from versatil_passes.memory_layout import is_layout_read, keep_output_layouts, let_views_copy
from versatil_passes.onednn_geometry import wrong_for_some_size
from versatil_passes.onednn_kernels import OneDNNKernels
from versatil_passes.versions import check_torch

aten = torch.ops.aten


class Int8Lowering:
    """Replace quantize/dequantize islands around linears and convolutions by int8 operators, and look up int8 rows.

    ::

        before:  qx -> dequantize -> linear(weight dequantize) -> add(residual) -> relu -> quantize
        after:   qx -> versatil.qlinear(weight, residual, "relu", output scale ...)

    The neutral operators are bound to kernels by :attr:`post_grad_pass`, after every pattern of Inductor has had its
    turn. Which forms are taken is decided by the rules alone; embeddings, which need no kernel, are taken everywhere
    (:mod:`versatil_passes.int8_embedding`). Every linear, convolution, matrix product, embedding
    or recurrent layer that stays float is recorded with its reason. That record *is* the audit.

    Requires: a graph of aten overloads as ``convert_pt2e`` leaves it; runs after :class:`QuantLiftUp`
    and :class:`KeepInt8`.
    Guarantees: the value of each replaced chain is what the quantize/dequantize ops define; nothing is written to;
    whatever is declined stays as it was.

    Args:
        rules: What the hardware's kernels can do.

    Attributes:
        record: What the last run lowered and declined.
    """

    runs_after = ("QuantLiftUp", "QuantizeLayerOutputs", "KeepInt8")

    def __init__(self, rules: LoweringRules) -> None:
        """Keep the rules."""
        check_torch()
        self.rules = rules
        self.record = LoweringRecord()

    @property
    def post_grad_pass(self) -> OneDNNKernels | GemmKernels:
        """The second half, for Inductor's post-grad slot."""
        return self.kernels(allow_in_place=True)

    def kernels(self, *, allow_in_place: bool) -> OneDNNKernels | GemmKernels:
        """The pass that binds the int8 operators of this lowering to the hardware's kernels.

        Args:
            allow_in_place: Whether a kernel may write its result over another tensor; for functional graphs only.
        """
        if self.rules.kernels == "gemm":
            return GemmKernels()
        return OneDNNKernels(allow_in_place=allow_in_place)

    def __call__(self, graph: Graph) -> LoweringRecord:
        """Rewrite ``graph`` in place.

        Args:
            graph: An exported graph, or Dynamo's graph of one.

        Returns:
            What was lowered and what was declined, in graph order.
        """
        order = node_order(graph)
        lowered: list[LoweredOp] = []
        declined: list[DeclinedOp] = []
        # Backwards, so that of two convolutions that are added the later one absorbs the addition.
        for node in reversed(list(graph.nodes)):
            name = FLOAT_LAYERS.get(node.target) if node.op == "call_function" else None
            if name is None:
                continue
            try:
                lowered.append(self._lower(node, name))
            except _Declined as why:
                declined.append(DeclinedOp(node.name, module_path_of(node), name, str(why)))
        if any(op.op in CONVOLUTIONS for op in lowered):
            let_views_copy(graph)
            keep_output_layouts(graph)
        names = {node.name: position for node, position in order.items()}
        self.record = LoweringRecord(
            tuple(sorted(lowered, key=lambda op: names[op.node])),
            tuple(sorted(declined, key=lambda op: names[op.node])),
        )
        return self.record

    def uuid(self) -> str:
        """Identity for compile caches: the rules are its options."""
        rules = ", ".join(f"{name}={_stable(value)}" for name, value in vars(self.rules).items())
        return f"versatil_passes.Int8Lowering/3({rules})"

    def _lower(self, node: Node, op: str) -> LoweredOp:
        if op in EMBEDDINGS:
            found = lower_embedding(node)
            if isinstance(found, str):
                raise _Declined(found)
            return found
        if op not in LINEAR_AND_CONV:
            advice = f": {ADVICE[op]}" if op in ADVICE else ""
            raise _Declined(f"{op} has no int8 kernel in this release{advice}")
        if op not in self.rules.ops:
            raise _Declined(f"the backend has no int8 kernel for {op}")
        is_gemm = self.rules.kernels == "gemm"
        groups = 1 if op == "linear" else conv_groups(node)
        if is_gemm and groups > 1:
            raise _Declined(
                f"it has {groups} groups; the backend's kernel is one product of matrices"
            )
        activation = self._activation(node, op)
        weight, w_scale = self._weight(node)
        _check_layout(node, op)
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        if bias is not None and constant_of(bias) is None:
            raise _Declined("its bias is computed at run time; the kernel wants a constant")
        qx, x_scale, x_zero_point, _, input_quant_max = args_of(activation)[:5]
        call = Int8Call(qx, x_scale, x_zero_point, weight, w_scale, bias, _geometry(node, op))
        reason = None if is_gemm else wrong_for_some_size(call)
        if reason is not None:
            raise _Declined(reason)
        columns = self._columns_bytes(call, node) if is_gemm and op != "linear" else 0
        record = emit_int8_op(self._collect(call, op, node), op, input_quant_max)
        if is_gemm:
            record = replace(record, kernel="onednn.qlinear_pointwise", columns_bytes=columns)
        record = replace(record, kernel_class=self.rules.kernel_class)
        return self._with_pairs(record, constant_of(weight), input_quant_max)

    def _columns_bytes(self, call: Int8Call, node: Node) -> int:
        """Memory of a convolution's columns for one image, if it is known and not too much."""
        value = value_of(node)
        if call.is_one_by_one:
            return 0
        if value is None or not all(isinstance(size, int) for size in value.shape[2:]):
            raise _Declined(
                "its spatial sizes are dynamic; the backend copies what a kernel larger than 1 covers, and needs "
                "fixed ones (a dynamic batch size is fine)"
            )
        size = columns_bytes(call, value.shape)
        limit = self.rules.columns_bytes_max
        if limit is not None and size > limit:
            raise _Declined(
                f"what its kernel covers takes {size / 1e3:.0f} kB for each image, more than the backend allows "
                f"({limit / 1e3:.0f} kB)"
            )
        return size

    def _with_pairs(
        self, record: LoweredOp, weight: torch.Tensor | None, input_quant_max: int
    ) -> LoweredOp:
        """Add to the record what says whether the kernel may saturate."""
        pairs = self.rules.saturating_pairs
        if pairs is None:
            return record
        assert weight is not None  # others were declined
        largest = pairs.largest_sums(weight).tolist()
        return replace(
            record,
            pair_sum=max(largest, default=0),  # a layer may have no output channel
            pair_limit=pairs.limit(input_quant_max),
        )

    def _activation(self, node: Node, op: str) -> Node:
        """The dequantize that feeds ``node``."""
        activation = node.args[0]
        qd = torch.ops.quantized_decomposed
        static, dynamic = qd.dequantize_per_tensor.default, qd.dequantize_per_tensor.tensor
        if not isinstance(activation, Node) or activation.target not in (static, dynamic):
            raise _Declined(f"its input is not quantized: {NOT_ANNOTATED}")
        if activation.target is dynamic and op not in self.rules.dynamic_ops:
            raise _Declined(
                f"the backend has no {op} kernel for dynamic activations: quantize it statically"
            )
        dtype = activation.args[5]
        if dtype not in self.rules.activation_dtypes:
            wanted = ", ".join(str(known) for known in self.rules.activation_dtypes)
            raise _Declined(f"its activations are {dtype}; the kernels take {wanted}")
        if activation.kwargs.get("out_dtype") not in (None, torch.float32):
            raise _Declined(
                f"it computes in {activation.kwargs['out_dtype']}; only float32 is supported"
            )
        if is_written(activation):
            raise _Declined(
                "an op writes to its dequantized input in place: use the out-of-place form"
            )
        return activation

    def _weight(self, node: Node) -> tuple[Node, Node | float]:
        """The int8 weight, and its scales: one number, or a tensor of one for each output channel."""
        dequantize = node.args[1]
        qd = torch.ops.quantized_decomposed
        per_channel, per_tensor = (
            qd.dequantize_per_channel.default,
            qd.dequantize_per_tensor.default,
        )
        if not isinstance(dequantize, Node) or dequantize.target not in (per_channel, per_tensor):
            raise _Declined(f"its weight is not quantized: {NOT_ANNOTATED}")
        granularity = "per_channel" if dequantize.target is per_channel else "per_tensor"
        if granularity not in self.rules.weight_granularities:
            raise _Declined(
                f"its weight is quantized {granularity}, for which the backend has no kernel"
            )
        weight, scale, zero_point = args_of(dequantize)[:3]
        value = constant_of(weight)
        if value is None and weight.op == "placeholder":
            raise _Declined(
                "its weight is an input of the graph, not a constant: freezing is off, or gradients are on"
            )
        if value is None:
            raise _Declined("its weight is quantized at run time: convert with fold_quantize=True")
        if value.dtype is not torch.int8:
            raise _Declined(f"its weight is {value.dtype}; the kernels take int8")
        assert isinstance(weight, Node)
        if granularity == "per_tensor":
            if zero_point != 0:
                raise _Declined(
                    f"its weight has zero_point {zero_point}; the kernels take symmetric weights"
                )
            return weight, float(scale)
        zero_points = constant_of(zero_point)
        if (
            dequantize.args[3] != 0
            or zero_points is None
            or bool(zero_points.any())
            or constant_of(scale) is None
        ):
            raise _Declined(
                "its weight is not symmetric over constant output channels (axis 0, zero_point 0)"
            )
        if constant_of(scale).dtype is not torch.float32:  # type: ignore[union-attr] # checked above
            raise _Declined("its weight's scales are not float32: quantize with that default dtype")
        assert isinstance(scale, Node)
        return weight, scale

    def _collect(self, call: Int8Call, op: str, node: Node) -> Int8Chain:
        """Follow single readers from ``node`` and take what the kernel can do as well."""
        chain = self._take_residual(Int8Chain(call, (node,)), op)
        chain = self._take_post_op(chain, op)
        ended = self._take_end(chain)
        if chain.call.other is not None and not _is_residual_form(ended.call):
            # Kernels add in place: to a tensor of the result's dtype. Inductor fuses the rest into one loop.
            return self._take_end(self._take_post_op(Int8Chain(call, (node,)), op))
        return ended

    def _take_end(self, chain: Int8Chain) -> Int8Chain:
        """Take what brings the result to another dtype: a quantize, or a cast to bfloat16."""
        if self.rules.allow_bfloat16_output:
            cast = chain.next_op()
            if cast is not None and is_cast(cast, torch.bfloat16):
                call = replace(chain.call, output_dtype=torch.bfloat16)
                return chain.extended(cast, call)
        return self._take_quantize(chain)

    def _take_residual(self, chain: Int8Chain, op: str) -> Int8Chain:
        add = chain.next_op({aten.add.Tensor, aten.add_.Tensor})
        if add is None or op not in self.rules.residual_post_ops or add.kwargs.get("alpha", 1) != 1:
            return chain
        first, second = add.args[:2]
        other = second if first is chain.last else first
        if (
            not isinstance(other, Node)
            or other is chain.last
            or (add.target is aten.add_.Tensor and second is chain.last)
        ):
            return chain
        ours, theirs = value_of(chain.last), value_of(other)
        if (
            ours is None
            or theirs is None
            or ours.dtype != torch.float32
            or theirs.dtype not in {torch.float32, torch.bfloat16}
            or not same_shape(ours, theirs)
        ):
            return chain
        call = replace(chain.call, other=other)
        dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        if (
            op != "linear"
            and other.target is dequantize
            and other.args[5] in self.rules.activation_dtypes
            and not is_written(other)
        ):
            quantized, scale, zero_point = args_of(other)[:3]
            call = replace(call, other=quantized, other_scale=scale, other_zero_point=zero_point)
        return chain.extended(add, call)

    def _take_post_op(self, chain: Int8Chain, op: str) -> Int8Chain:
        reader = chain.next_op()
        post_op = None if reader is None else post_op_of(reader)
        if reader is None or post_op is None:
            return chain
        name, args = post_op
        rule = "gelu" if name == "gelu_tanh" else name
        if not self.rules.admits_post_op(op, rule, has_residual=chain.call.other is not None):
            return chain
        return chain.extended(reader, replace(chain.call, post_op=name, post_op_args=args))

    def _take_quantize(self, chain: Int8Chain) -> Int8Chain:
        quantize = chain.next_op({torch.ops.quantized_decomposed.quantize_per_tensor.default})
        if quantize is None or not self.rules.allow_int8_output:
            return chain
        scale, zero_point, quant_min, quant_max, dtype = args_of(quantize)[1:6]
        call = replace(
            chain.call,
            output_scale=scale,
            output_zero_point=zero_point,
            output_quant_min=quant_min,
            output_quant_max=quant_max,
            output_dtype=dtype,
        )
        if dtype not in self.rules.activation_dtypes:
            return chain
        return chain.extended(quantize, call)


def _check_layout(node: Node, op: str) -> None:
    """Convolution kernels take batches, and write channels last."""
    if op == "linear":
        return
    dimensions = 2 + CONVOLUTIONS[op]
    value = value_of(node)
    if value is not None and value.dim() != dimensions:
        raise _Declined(
            f"its input has no batch dimension; the kernel takes {dimensions} dimensions"
        )
    if is_layout_read(node):
        raise _Declined("an op behind it depends on the memory layout, which the kernel changes")


def _geometry(node: Node, op: str) -> tuple[list[int], list[int], list[int], int] | None:
    if op == "linear":
        return None
    geometry = conv_geometry(node)
    if isinstance(geometry, str):
        raise _Declined(geometry)
    return geometry


class _Declined(Exception):  # noqa: N818 - not an error: a decision, with its reason
    """Ends the lowering of one operator."""


def _is_residual_form(call: Int8Call) -> bool:
    """Whether the other operand and the result have the same dtype, so that one may be written over the other."""
    if (call.other_scale, call.other_zero_point) != (1.0, 0):
        return call.has_int8_output
    value = value_of(call.other)
    return value is not None and value.dtype == call.output_dtype


def _stable(value: Any) -> str:
    """A text that is the same in every process, whatever order a set has."""
    if isinstance(value, frozenset):
        return repr(sorted(value))
    if isinstance(value, dict):
        return repr({key: sorted(value[key]) for key in sorted(value)})
    return repr(value)
