"""Float parts in bfloat16 around int8 tables, and behind training."""

import pytest
import torch
from torch import Tensor, nn

from versatil_core import (
    audit,
    check_exactness,
    compile,  # noqa: A004 -- the verb
    convert,
    lower,
    prepare_qat,
    quantize,
    sqnr_db,
)
from versatil_x86 import X86InductorBackend

INDICES = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


class Tied(nn.Module):
    """A table that is the last linear's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, indices: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(self.table(indices)))
        return result


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 16, mode="sum", padding_idx=3)
        self.head = nn.Linear(16, 8)

    def forward(self, indices: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.bag(indices)))
        return result


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("make", [Tied, Bag])
def test_tables_stay_int8(make: type[nn.Module], *, is_dynamic: bool) -> None:
    model = make().eval()
    backend = X86InductorBackend(is_dynamic, saturation="safe", float_dtype="bfloat16")

    reference = quantize(model, INDICES, backend, [INDICES])

    floats = [layer.op for layer in audit(reference, backend).float_layers]
    assert set(floats) <= {"scaled_dot_product_attention"}
    result = compile(reference, backend)(INDICES)
    assert result.dtype is reference(INDICES).dtype is torch.bfloat16
    assert sqnr_db(reference(INDICES).float(), model(INDICES)) > 35
    check_exactness(reference, lower(reference, backend), (INDICES,)).raise_if_inexact()


def test_a_table_in_bfloat16_has_its_reason() -> None:
    backend = X86InductorBackend(saturation="safe")
    reference = quantize(Bag().eval().bfloat16(), INDICES, backend, [INDICES])

    [table] = audit(reference, backend).float_layers

    assert table.reason == "its table is torch.bfloat16; int8 stands for float32 only"


def test_a_trained_model_gets_the_dtype() -> None:
    backend = X86InductorBackend(saturation="safe", float_dtype="bfloat16")
    trainable = prepare_qat(Tied(), INDICES, backend)
    trainable(INDICES).square().mean().backward()

    reference = convert(trainable.eval())

    assert trainable(INDICES).dtype is torch.float32  # it learns in float32
    assert reference(INDICES).dtype is torch.bfloat16
    assert sqnr_db(reference(INDICES).float(), trainable(INDICES)) > 35
    check_exactness(reference, lower(reference, backend), (INDICES,)).raise_if_inexact()
