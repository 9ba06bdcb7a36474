"""How far one tensor is from another: the energies of signal and noise, and their ratio in dB."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from versatil_core._torch_compat import tree_leaves


@dataclass(frozen=True)
class Energies:
    """Sums of squares, which add up over batches and over tensors.

    Attributes:
        signal: Of what is expected.
        noise: Of the difference; ``inf`` where one of the two has infinities or NaNs that the other has not.
    """

    signal: float = 0.0
    noise: float = 0.0

    def __add__(self, other: "Energies") -> "Energies":
        return Energies(self.signal + other.signal, self.noise + other.noise)

    @property
    def db(self) -> float:
        """Signal to quantization noise ratio: ``10 * log10(signal / noise)``."""
        if self.noise == 0:
            return math.inf
        is_ratio = self.signal > 0 and math.isfinite(self.noise)
        return 10 * math.log10(self.signal / self.noise) if is_ratio else -math.inf


def energies(result: torch.Tensor, expected: torch.Tensor) -> Energies:
    """Compare two tensors of one shape; infinities and NaNs that both have are left out."""
    is_finite = torch.isfinite(expected)
    if not is_equal(expected[~is_finite], result[~is_finite]):
        return Energies(0.0, math.inf)
    wanted, got = expected[is_finite].double(), result[is_finite].double()
    return Energies(wanted.square().sum().item(), (wanted - got).square().sum().item())


def sqnr_db(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Signal to quantization noise ratio: ``20 * log10(|expected| / |expected - result|)``, in dB.

    Args:
        result: Any tensor.
        expected: A tensor of the same shape.

    Returns:
        ``inf`` where the two are equal, ``-inf`` where only ``expected`` is all zero, or where one of them has
        infinities or NaNs and the other has not the same. Otherwise those are left out.

    Example:
        >>> round(sqnr_db(torch.tensor([1.0, 1.1]), torch.tensor([1.0, 1.0])), 1)
        23.0
    """
    return energies(result, expected).db


def tree_energies(result: Any, expected: Any) -> Energies:
    """Compare every float tensor of two equal structures, element by element whatever the shapes.

    Raises:
        ValueError: They have not the same number of float tensors.
    """
    pairs = zip(float_tensors(result), float_tensors(expected), strict=True)
    return sum_energies(energies(got.flatten(), want.flatten()) for got, want in pairs)


def sum_energies(parts: Iterable[Energies]) -> Energies:
    """Add up."""
    return sum(parts, Energies())


def float_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the float tensors of a nested result, complex ones as pairs of floats, in order."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return [part for part in parts if part.is_floating_point()]


def is_equal(first: Any, second: Any) -> bool:
    """Whether two tensors are equal, NaNs included; whatever is no tensor passes."""
    if not isinstance(first, torch.Tensor):
        return True
    return torch.equal(first.nan_to_num(), second.nan_to_num()) and torch.equal(
        first.isnan(), second.isnan()
    )
