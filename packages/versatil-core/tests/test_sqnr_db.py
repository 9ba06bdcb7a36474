"""Signal to quantization noise ratio, with its edge cases."""

import math

import pytest
import torch

from versatil_core import sqnr_db


@pytest.mark.parametrize(
    ("result", "expected", "db"),
    [
        ([1.0, 2.0], [1.0, 2.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], math.inf),
        ([], [], math.inf),
        ([0.0, 1e-9], [0.0, 0.0], -math.inf),
        ([math.nan, 1.0], [1.0, 1.0], -math.inf),
        ([1.0, 1.0], [math.nan, 1.0], -math.inf),
        ([math.inf, 1.0], [1.0, 1.0], -math.inf),
        ([-math.inf, 1.0], [-math.inf, 1.0], math.inf),  # an attention mask
        ([math.inf, 1.1], [math.inf, 1.0], 20.0),
        ([math.inf, 1.0], [-math.inf, 1.0], -math.inf),
        ([math.nan, 1.0], [math.nan, 1.0], math.inf),
        ([1.1, 0.0], [1.0, 0.0], 20.0),
        ([0.0, 0.0], [3.0, 4.0], 0.0),
        ([-1.0], [1.0], -6.02),
    ],
)
def test_sqnr_db(result: list[float], expected: list[float], db: float) -> None:
    got = sqnr_db(torch.tensor(result), torch.tensor(expected))

    assert got == pytest.approx(db, abs=0.01)


def test_sqnr_db_does_not_round_in_half_precision() -> None:
    """Norms are taken in float64: the squares of these would overflow."""
    x = torch.full((4,), 60_000.0, dtype=torch.float16)

    assert sqnr_db(x, x / 2) == pytest.approx(0.0, abs=0.01)
