"""The Dynamo backend ``torch.compile(reference, backend="versatil_arm")``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def versatil_arm(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """Compile one graph of a reference to int8 kernels.

    torch finds this function through its entry point, so nothing has to be imported.

    Args:
        graph_module: What Dynamo captured.
        example_inputs: Its inputs.

    Returns:
        The compiled function.
    """
    from versatil_arm.backend import ArmInductorBackend
    from versatil_core.compile import dynamo_backend

    # Static or dynamic is decided by the graph; the options only matter for quantizing.
    compile_graph = dynamo_backend(ArmInductorBackend.for_host())
    compiled: Callable[..., Any] = compile_graph(graph_module, example_inputs)
    return compiled
