"""The demo's first subject: a small residual CNN that reads handwritten digits.

The 1,797 images are the UCI handwritten digits that scikit-learn ships. The net trains
in seconds, and has what makes int8 interesting: convolutions with batch norm, relu and
relu6, a depthwise convolution, residual adds, and a linear layer at the end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from versatil_core.demo_subject import Subject, require_extra
from versatil_core.progress import StageProgress

__all__ = ["Digits", "DigitsNet", "digits_subject", "load_digits", "train"]

SEED = 0
BATCH = 64
EPOCHS = 4
HELD_OUT = 448  # seven batches, a quarter of the images


@dataclass(frozen=True)
class Digits:
    """The images, split into what the net learns from and what it is judged by.

    Attributes:
        train_images: float32 ``[1349, 1, 16, 16]``, from 0 to 1.
        train_labels: int64 ``[1349]``.
        test_images: float32 ``[448, 1, 16, 16]``.
        test_labels: int64 ``[448]``.
    """

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


class ResidualBlock(nn.Module):
    """relu(x + conv(relu(conv(x)))), each convolution with batch norm; keeps the shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, channels, height, width]`` to the same shape."""
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(inner)))


class DigitsNet(nn.Module):
    """Ten logits for each image of ``[batch, 1, 16, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()
        )
        self.block1 = ResidualBlock(32)
        self.depthwise = nn.Sequential(
            nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=32, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU6(),
        )
        self.widen = nn.Sequential(
            nn.Conv2d(32, 128, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU()
        )
        self.block2 = ResidualBlock(128)
        self.head = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map float32 ``[batch, 1, 16, 16]`` to logits ``[batch, 10]``."""
        x = self.block1(self.stem(images))
        x = self.block2(self.widen(self.depthwise(x)))
        logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def digits_subject(progress: StageProgress) -> Subject:
    """Load the digits and train the net.

    Args:
        progress: Shows the training.

    Returns:
        The trained net; it is calibrated with images that it was trained with.

    Raises:
        DemoExtraMissingError: scikit-learn isn't installed.
    """
    require_extra("sklearn")
    digits = load_digits()
    with progress.stage("train the float model", total=EPOCHS) as advance:
        net = train(digits, advance)
    calibration = torch.split(digits.train_images[: 8 * BATCH], BATCH)
    held_out = torch.split(digits.test_images, BATCH)
    return Subject(
        title="a residual CNN reads handwritten digits",
        model=net,
        calibration=tuple((batch,) for batch in calibration),
        held_out=tuple((batch,) for batch in held_out),
        held_out_name=f"{len(digits.test_labels)} unseen images",
        answers=lambda logits: logits.argmax(dim=1),
        is_right=lambda answers: answers == digits.test_labels,
    )


def load_digits() -> Digits:
    """Load the images that scikit-learn ships, doubled to 16 by 16, in a seeded order."""
    from sklearn.datasets import load_digits as load_from_sklearn

    bunch = load_from_sklearn()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(SEED))
    images = torch.from_numpy(bunch.images).float()[order, None] / 16
    images = nn.functional.interpolate(images, scale_factor=2, mode="bilinear")
    labels = torch.from_numpy(bunch.target).long()[order]
    return Digits(images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:])


def train(digits: Digits, on_epoch: Callable[[], None] | None = None) -> DigitsNet:
    """Train the net, the same on every run of one machine.

    Args:
        digits: Only the training part is looked at.
        on_epoch: Called after each of the `EPOCHS` epochs.

    Returns:
        The trained net in eval mode.
    """
    # The caller's random numbers stay theirs.
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(SEED)
        net = DigitsNet()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        batches = len(digits.train_labels) // BATCH
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.01, total_steps=EPOCHS * batches
        )
        for _ in range(EPOCHS):
            order = torch.randperm(len(digits.train_labels))
            for index in torch.split(order[: batches * BATCH], BATCH):
                loss = nn.functional.cross_entropy(
                    net(digits.train_images[index]), digits.train_labels[index]
                )
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
            if on_epoch is not None:
                on_epoch()
    return net.eval()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Train alike on any number of cores.

    With batches this small it is also quicker where the machine is busy: several threads would
    mostly wait for one another.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
