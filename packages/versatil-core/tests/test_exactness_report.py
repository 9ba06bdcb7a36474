"""An exactness report weighs the ops and the whole."""

import pytest
import torch

from versatil_core import ExactnessReport, OpExactness


@pytest.mark.parametrize(
    ("end_to_end_db", "loss_db", "is_exact"),
    [(9.0, None, False), (11.0, None, True), (9.0, 0.2, True), (90.0, 0.4, False)],
)
def test_ops_alone_do_not_make_a_model(
    end_to_end_db: float, loss_db: float | None, *, is_exact: bool
) -> None:
    """Each op may be right while one reads what another has overwritten."""
    op = OpExactness("linear", "linear -> float32", torch.float32, 120.0, None, None)

    report = ExactnessReport((op,), end_to_end_db, are_inputs_untouched=True, loss_db=loss_db)

    assert report.is_exact == is_exact
