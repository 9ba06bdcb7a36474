"""What a demo shows: a model with real data, and how to tell a right answer."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from versatil_passes.errors import VersatilError

__all__ = ["DemoExtraMissingError", "Subject", "require_extra"]


class DemoExtraMissingError(VersatilError, ImportError):
    """A package of the demo extra isn't installed.

    Attributes:
        package: Its import name.
    """

    def __init__(self, package: str) -> None:
        super().__init__(
            f"the demo needs the package {package}, which isn't installed. "
            'Run: pip install "versatil-core[demo]"'
        )
        self.package = package


def require_extra(*packages: str) -> None:
    """Refuse to start a demo that would fail halfway.

    Args:
        packages: Import names; none of them is imported.

    Raises:
        DemoExtraMissingError: One of them isn't installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise DemoExtraMissingError(package)


@dataclass(frozen=True)
class Subject:
    """A float model with its data.

    Attributes:
        title: The model in a few words.
        model: In eval mode.
        calibration: Batches, each a tuple of the model's inputs.
        held_out: Batches that neither training nor calibration has seen, all of one shape.
        held_out_name: What the held-out data is, with its number.
        answers: From the model's outputs for all held-out batches to one answer, int64,
            for each sample.
        is_right: From the answers to one bool for each.
    """

    title: str
    model: nn.Module
    calibration: tuple[tuple[torch.Tensor, ...], ...]
    held_out: tuple[tuple[torch.Tensor, ...], ...]
    held_out_name: str
    answers: Callable[[torch.Tensor], torch.Tensor]
    is_right: Callable[[torch.Tensor], torch.Tensor]
