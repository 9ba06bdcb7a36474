"""What the judge of numerics found, and from where on it speaks of a fault."""

import io
import math
from dataclasses import dataclass

import torch

from versatil_passes import VersatilError

MIN_FLOAT_DB = 60.0
"""A float result at least this close (SQNR) is the same computation in another order of summation."""
MAX_STEP_SHARE = 0.001
"""Share of int8 elements that may be one step off: values that lie between two steps round either way."""
MIN_END_TO_END_DB = 10.0
"""SQNR of a whole model against its reference below which its ops are not put together rightly."""
MAX_END_TO_END_LOSS_DB = 0.3
"""How much farther from float than the reference a whole model may be: flips of one step that add up."""


class InexactError(VersatilError, AssertionError):
    """Int8 kernels do not give what the reference defines; ``report`` has the details."""

    def __init__(self, report: "ExactnessReport") -> None:
        """Show the whole report."""
        self.report = report
        super().__init__(
            f"{len(report.disagreements)} of {len(report.ops)} ops are not exact\n{report}"
        )


@dataclass(frozen=True)
class OpExactness:
    """How one op compares with the reference, both fed the reference's inputs.

    Attributes:
        node: Name of the reference's node whose value was compared.
        op: ``"linear + relu -> uint8"`` for a lowered op, else the operator's name.
        dtype: Dtype of the result.
        sqnr_db: Signal to difference, in dB, of a float result; ``inf`` where equal. ``None`` for an integer one.
        max_steps: Largest difference, in steps, of an integer result; ``None`` for a float one.
        different_share: Share of the elements of an integer result that differ; ``None`` for a float one.
    """

    node: str
    op: str
    dtype: torch.dtype
    sqnr_db: float | None
    max_steps: int | None
    different_share: float | None

    @property
    def is_exact(self) -> bool:
        """Float: at least 60 dB. Integer: within one step, and different in at most 0.1 % of the elements."""
        if self.sqnr_db is not None:
            return self.sqnr_db >= MIN_FLOAT_DB
        assert self.max_steps is not None
        assert self.different_share is not None
        return self.max_steps <= 1 and self.different_share <= MAX_STEP_SHARE

    @property
    def difference(self) -> str:
        """How far it is from the reference, for people."""
        if self.sqnr_db is not None:
            return "equal" if self.sqnr_db == math.inf else f"{self.sqnr_db:.1f} dB"
        if not self.max_steps:
            return "equal"
        steps = "1 step" if self.max_steps == 1 else f"{self.max_steps} steps"
        return f"up to {steps}, in {100 * (self.different_share or 0):.2g} %"


@dataclass(frozen=True)
class ExactnessReport:
    """What :func:`check_exactness` found; ``print`` it for a table of the ops that disagree.

    Attributes:
        ops: Every op that was compared, in graph order.
        end_to_end_db: SQNR of the whole model's result against the reference's, each fed only the inputs.
        are_inputs_untouched: Whether every input tensor was as after a run of the reference: as before, unless the
            model itself writes to it.
        loss_db: How much farther from float than the reference the result is, in dB; ``None`` without a float model.
    """

    ops: tuple[OpExactness, ...]
    end_to_end_db: float
    are_inputs_untouched: bool
    loss_db: float | None

    @property
    def disagreements(self) -> tuple[OpExactness, ...]:
        """The ops that are not exact."""
        return tuple(op for op in self.ops if not op.is_exact)

    @property
    def is_exact(self) -> bool:
        """Whether every op agrees, no input was written to, and the whole is near the reference.

        Near means: no farther from float than the reference is, where that is known; otherwise,
        above a floor that only tells apart flips of one step, which add up, from a wrong graph.
        """
        if self.loss_db is None:
            is_near = self.end_to_end_db >= MIN_END_TO_END_DB
        else:
            is_near = self.loss_db <= MAX_END_TO_END_LOSS_DB
        return not self.disagreements and self.are_inputs_untouched and is_near

    def raise_if_inexact(self) -> None:
        """Raise unless :attr:`is_exact`.

        Raises:
            InexactError: With this report.
        """
        if not self.is_exact:
            raise InexactError(self)

    def __str__(self) -> str:
        """A summary, and a table of the ops that disagree."""
        from rich.console import Console
        from rich.table import Table

        loss = "" if self.loss_db is None else f", {self.loss_db:+.2f} dB farther from float"
        inputs = "inputs untouched" if self.are_inputs_untouched else "INPUTS WERE OVERWRITTEN"
        exact = len(self.ops) - len(self.disagreements)
        summary = f"{exact} of {len(self.ops)} ops exact; end to end {self.end_to_end_db:.1f} dB{loss}; {inputs}"
        if not self.disagreements:
            return summary
        table = Table("node", "op", "dtype", "difference", show_edge=False)
        for op in self.disagreements:
            table.add_row(op.node, op.op, str(op.dtype).removeprefix("torch."), op.difference)
        buffer = io.StringIO()
        console = Console(file=buffer, width=100, no_color=True)
        console.print(table)
        return f"{summary}\n{buffer.getvalue().rstrip()}"
