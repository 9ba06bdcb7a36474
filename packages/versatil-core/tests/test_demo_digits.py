"""The net of the demo, without scikit-learn: small random images stand in for the digits."""

import pytest
import torch

from versatil_core.demo_digits import Digits, DigitsNet, digits_subject, train
from versatil_core.progress import StageProgress


def random_digits() -> Digits:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(96, 1, 16, 16, generator=generator)
    labels = torch.randint(10, (96,), generator=generator)
    return Digits(images[:64], labels[:64], images[64:], labels[64:])


def test_the_net_maps_images_to_ten_logits() -> None:
    assert DigitsNet()(torch.zeros(3, 1, 16, 16)).shape == (3, 10)


def test_training_is_repeatable_and_changes_nothing_of_the_callers() -> None:
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    epochs: list[None] = []
    first = train(random_digits(), lambda: epochs.append(None))
    second = train(random_digits())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert not first.training
    assert len(epochs) == 4
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_net_reads_real_digits() -> None:
    pytest.importorskip("sklearn")
    subject = digits_subject(StageProgress(None))
    assert [batch[0].shape for batch in subject.held_out] == [(64, 1, 16, 16)] * 7
    with torch.no_grad():
        answers = subject.answers(torch.cat([subject.model(*batch) for batch in subject.held_out]))
    assert subject.is_right(answers).double().mean() > 0.95
