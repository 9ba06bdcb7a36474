"""What a module for quantization-aware training knows about itself."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from versatil_core.reference_info import InputSpec, TargetInfo

_META_KEY = "versatil_training"


@dataclass(frozen=True)
class TrainingRecord:
    """How a module for training was made; kept in its ``meta``.

    Attributes:
        targets: What is quantized, and for which backend.
        batch_norms: Those that are folded in the end: name of a layer's node -> path of its batch norm.
        inputs: What the module takes.
    """

    targets: tuple[TargetInfo, ...]
    batch_norms: Mapping[str, str]
    inputs: tuple[InputSpec, ...]


def training_record(module: torch.nn.Module) -> TrainingRecord | None:
    """Return how a module for training was made; None if it is something else."""
    record = getattr(module, "meta", {}).get(_META_KEY)
    return record if isinstance(record, TrainingRecord) else None


def attach_training_record(module: torch.fx.GraphModule, record: TrainingRecord) -> None:
    """Keep the record with the module; deep copies of the module keep it too."""
    module.meta[_META_KEY] = record


def forget_training_record(module: torch.fx.GraphModule) -> None:
    """Remove the record from a module that is no longer for training."""
    module.meta.pop(_META_KEY, None)
