"""How the tables of embeddings are quantized: a scale for each row, and nothing else."""

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node
from torchao.quantization import pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec

from versatil_core.annotations import ANNOTATION
from versatil_passes.float_layers import FLOAT_LAYERS
from versatil_passes.graph_queries import arguments_of
from versatil_passes.int8_embedding import EMBEDDINGS, float_table_reason


def annotate_embeddings(nodes: Iterable[Node], *, is_qat: bool) -> None:
    """Annotate the tables of embeddings; indices and results stay as they are.

    A table that is also a layer's weight gets that layer's recipe, so that there is one int8 table for both.

    Args:
        nodes: Of an exported graph, without annotations; the layers around them have theirs.
        is_qat: Whether to insert fake quantization for training.
    """
    for node in nodes:
        if FLOAT_LAYERS.get(node.target) not in EMBEDDINGS or float_table_reason(node):
            continue
        given = arguments_of(node)
        if is_qat and given["sparse"]:
            continue  # the gradient of a fake quantization is not sparse
        table: Node = given["weight"]
        spec = next(_recipes(table), None) or _row_recipe(is_qat=is_qat)
        node.meta[ANNOTATION] = QuantizationAnnotation(
            input_qspec_map={table: spec}, _annotated=True
        )


def _recipes(table: Node) -> Iterator[QuantizationSpec]:
    """How the layers that read a table as their weight quantize it."""
    for reader in table.users:
        annotation = reader.meta.get(ANNOTATION)
        spec = None if annotation is None else annotation.input_qspec_map.get(table)
        if isinstance(spec, QuantizationSpec):
            yield spec


def _row_recipe(*, is_qat: bool) -> QuantizationSpec:
    observer = pt2e.PerChannelMinMaxObserver
    if is_qat:
        # A scale follows its row at once. (torch's fused fake quantization has other scales than converting gives.)
        observer = pt2e.FakeQuantize.with_args(
            observer=pt2e.MovingAveragePerChannelMinMaxObserver, averaging_constant=1.0
        )
    return QuantizationSpec(
        dtype=torch.int8,
        # With -128 the largest value of a row would be rounded beyond 127, and clipped: it would have no gradient.
        quant_min=-127 if is_qat else -128,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
        observer_or_fake_quant_ctr=observer,
    )
