"""Embeddings on Arm: the same lookups of int8 rows, with either granularity of weights."""

import pytest
import torch
from torch import Tensor, nn

from versatil_arm import ArmInductorBackend
from versatil_core import audit, check_exactness, lower, quantize


class LanguageModel(nn.Module):
    """The table of its input is the weight of its output; a bag beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.bag = nn.EmbeddingBag(40, 16, mode="sum", padding_idx=2)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) + self.bag(ids)[:, None])


@pytest.mark.parametrize("is_per_channel", [True, False])
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.usefixtures("any_host")
def test_every_lookup_is_int8_and_equal(*, is_dynamic: bool, is_per_channel: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 40, (3, 6))
    backend = ArmInductorBackend(is_dynamic=is_dynamic, is_per_channel=is_per_channel)

    reference = quantize(LanguageModel().eval(), ids, backend, [ids])

    layers = audit(reference, backend).layers
    assert [(layer.op, layer.is_int8) for layer in layers] == [
        ("embedding", True),
        ("embedding_bag", True),
        ("linear", True),
    ]
    tables = [value for value in reference.state_dict().values() if value.dim() == 2]
    assert sorted(len(table) for table in tables) == [40, 50]
    assert {table.dtype for table in tables} == {torch.int8}
    report = check_exactness(reference, lower(reference, backend), (ids,))
    lookups = [op for op in report.ops if op.op.startswith("embedding")]
    assert [op.difference for op in lookups] == ["equal", "equal"]
    report.raise_if_inexact()
