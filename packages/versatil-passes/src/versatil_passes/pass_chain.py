"""Compose graph passes into one, with their order checked and their identity known."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Graph

from versatil_passes._torch_compat import call_pass, unwrap_pass, uuid_of
from versatil_passes.errors import PassError, PassOrderError

GraphPass = Callable[[Graph], Any]


class PassChain:
    """Several graph passes as one, run in the order given.

    Chains inside are flattened. A pass that stands twice (the same object, or an equal ``uuid``) runs once, at its
    first place. A pass may declare ``runs_after = ("Name", ...)``: a chain that holds a named pass later is refused.

    Args:
        *passes: Callables that take an FX graph and change it in place.

    Raises:
        PassOrderError: A pass stands before one that it must follow.

    Example:
        >>> from versatil_passes import QuantLiftUp
        >>> PassChain(QuantLiftUp(), PassChain(QuantLiftUp()))
        PassChain(QuantLiftUp)
    """

    def __init__(self, *passes: GraphPass) -> None:
        """Flatten, drop duplicates, check the order."""
        self.passes = _without_duplicates(_flatten(passes))
        _check_order(self.passes)

    def __call__(self, graph: Graph) -> None:
        """Run every pass on ``graph``.

        Raises:
            PassError: A pass raised; the message names it and those that ran before, and ``__cause__`` is its error.
        """
        done: list[str] = []
        for graph_pass in self.passes:
            try:
                call_pass(graph_pass, graph)
            except Exception as error:
                raise PassError(name_of(graph_pass), done, error) from error
            done.append(name_of(graph_pass))

    def uuid(self) -> str | None:
        """Identity over members and order, or ``None`` as soon as one member has none.

        Compile caches take ``None`` for "do not cache"; a wrong hit would be worse than a miss.
        """
        uuids = [uuid_of(graph_pass) for graph_pass in self.passes]
        return None if None in uuids else f"versatil_passes.PassChain({uuids!r})"

    def __repr__(self) -> str:
        """The members' names, in order."""
        return f"PassChain({', '.join(name_of(graph_pass) for graph_pass in self.passes)})"


def chain_pass(existing: Any, new: GraphPass) -> PassChain:
    """Put ``new`` behind whatever a custom pass slot of Inductor holds.

    A pass in the slot that must run after a new one moves behind it, so that the chains of two backends go together.

    Args:
        existing: ``None``, a callable, or a list of callables (torch 2.13 on).
        new: The pass to add.

    Returns:
        One chain of all of them, in order. It can be called by any torch version.

    Example:
        >>> chain_pass(None, print)
        PassChain(print)
    """
    before = (
        () if existing is None else existing if isinstance(existing, (list, tuple)) else (existing,)
    )
    held = _without_duplicates(_flatten(before))
    added = _without_duplicates([*held, *_flatten([new])])[len(held) :]
    must_follow = {name_of(graph_pass) for graph_pass in added}
    early: list[GraphPass] = []
    late: list[GraphPass] = []
    for graph_pass in held:
        if must_follow.isdisjoint(getattr(graph_pass, "runs_after", ())):
            early.append(graph_pass)
        else:
            late.append(graph_pass)
            must_follow.add(name_of(graph_pass))
    return PassChain(*early, *added, *late)


def name_of(graph_pass: Any) -> str:
    """The name under which messages list a pass: its class, or the function's own name."""
    return str(getattr(graph_pass, "__name__", type(graph_pass).__name__))


def _flatten(passes: Iterable[GraphPass]) -> list[GraphPass]:
    flat: list[GraphPass] = []
    for wrapped in passes:
        graph_pass = unwrap_pass(wrapped)
        flat.extend(graph_pass.passes if isinstance(graph_pass, PassChain) else [graph_pass])
    return flat


def _without_duplicates(passes: list[GraphPass]) -> tuple[GraphPass, ...]:
    kept: list[GraphPass] = []
    for graph_pass in passes:
        uuid = uuid_of(graph_pass)
        is_known = any(
            graph_pass is other or (uuid is not None and uuid == uuid_of(other)) for other in kept
        )
        if not is_known:
            kept.append(graph_pass)
    return tuple(kept)


def _check_order(passes: tuple[GraphPass, ...]) -> None:
    names = [name_of(graph_pass) for graph_pass in passes]
    for position, graph_pass in enumerate(passes):
        for earlier in getattr(graph_pass, "runs_after", ()):
            if earlier in names[position + 1 :]:
                raise PassOrderError(names[position], earlier)
