"""The float model as a graph whose nodes are those of the reference, quantization apart."""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from versatil_core import _torch_compat
from versatil_core.export import ModelInputs, export, input_specs
from versatil_core.reexport import dynamic_sizes
from versatil_passes.graph_queries import module_path_of

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer


def float_graph(
    float_model: torch.nn.Module, reference: GraphModule, example: ModelInputs
) -> GraphModule:
    """Capture a float model as it was before its reference was quantized.

    torchao folds batch norms into convolutions before it quantizes: so it does here, with a
    quantizer that has nothing quantized.

    Args:
        float_model: On the CPU; it is not changed.
        reference: What was made of it.
        example: Inputs of both.

    Raises:
        ExportError: torch cannot capture the model with these inputs.
    """
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    sizes = [spec.shape and dynamic_sizes(spec) for spec in input_specs(reference)]
    shapes = _torch_compat.dynamic_shapes_for_call(reference, sizes) if any(sizes) else None
    exported = export(float_model, example, dynamic_shapes=shapes)
    graph: GraphModule = prepare_pt2e(exported, _nothing_quantized())
    return graph


def matching_nodes(reference: GraphModule, of_float: GraphModule) -> Mapping[str, str]:
    """Find the node of the float model that each node of the reference stems from.

    Both graphs have the same operators in the same order, but for quantization. Where they
    don't, the longest common runs are matched, as ``difflib`` finds them: of operators that also
    come from the same module.

    Returns:
        Name in the reference -> name in the float graph. A node without a counterpart is left out.
    """
    ours, theirs = _operators(reference), _operators(of_float)
    if [node.target for node in ours] == [node.target for node in theirs]:
        return {our.name: their.name for our, their in zip(ours, theirs, strict=True)}
    matcher = SequenceMatcher(None, _keys(ours), _keys(theirs), autojunk=False)
    return {
        ours[block.a + step].name: theirs[block.b + step].name
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    }


def _operators(module: GraphModule) -> list[Node]:
    return [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and not str(node.target).startswith("quantized_decomposed.")
    ]


def _keys(nodes: Sequence[Node]) -> list[tuple[str, str]]:
    return [(str(node.target), module_path_of(node)) for node in nodes]


def _nothing_quantized() -> "Quantizer":
    from torchao.quantization.pt2e.quantizer import Quantizer

    class NothingQuantized(Quantizer):
        def annotate(self, model: GraphModule) -> GraphModule:
            return model

        def validate(self, model: GraphModule) -> Any:
            pass

    return NothingQuantized()
