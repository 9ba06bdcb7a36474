"""Install passes into Inductor for the duration of a ``with`` block."""

import contextlib
from collections.abc import Iterator
from typing import Any

from versatil_passes._torch_compat import inductor_value, pass_slot_value, patch_inductor_config
from versatil_passes.pass_chain import GraphPass, PassChain, chain_pass
from versatil_passes.versions import check_torch


@contextlib.contextmanager
def pre_grad_passes(*passes: GraphPass) -> Iterator[None]:
    """Let ``torch.compile`` run ``passes`` before autograd, after those that the user has installed already.

    A pass with a ``post_grad_pass`` (its second half, as :class:`Int8Lowering` has) gets that one installed as well.
    ``torch.compile`` compiles at the first call: that call must be inside the block.

    Args:
        *passes: Callables that take an FX graph and change it in place.

    Raises:
        PassOrderError: A pass stands before one that it must follow.

    Example:
        >>> import torch
        >>> seen = []
        >>> with pre_grad_passes(lambda graph: seen.append(len(graph.nodes))):
        ...     result = torch.compile(lambda x: x + 1)(torch.zeros(2))
        >>> len(seen)
        1
    """
    with patch_inductor_config(pass_slots(*passes)):
        yield


def pass_slots(*passes: GraphPass) -> dict[str, Any]:
    """The Inductor config values that add ``passes`` to those installed now.

    Args:
        *passes: Callables that take an FX graph and change it in place.

    Returns:
        Names of config values, and the chains to put there.

    Raises:
        UnsupportedVersionError: This torch is not one that is tested.
    """
    check_torch()
    first_halves = PassChain(*passes).passes
    second_halves = [
        graph_pass.post_grad_pass
        for graph_pass in first_halves
        if hasattr(graph_pass, "post_grad_pass")
    ]
    wanted = {
        "pre_grad_custom_pass": first_halves,
        "post_grad_custom_post_pass": tuple(second_halves),
    }
    return {
        slot: pass_slot_value(chain_pass(inductor_value(slot), PassChain(*added)))
        for slot, added in wanted.items()
        if added
    }
