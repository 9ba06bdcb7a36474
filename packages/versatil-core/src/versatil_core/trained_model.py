"""Takes a module from quantization-aware training to where it can be converted."""

import copy
from typing import Any

from torch.fx import GraphModule
from torchao.quantization.pt2e import FakeQuantizeBase

from versatil_core import _torch_compat
from versatil_core.batch_norm_folding import fold_batch_norms
from versatil_core.errors import CalibrationError
from versatil_core.trained_ranges import TrainedRange, has_range, is_measured
from versatil_core.training_record import TrainingRecord, forget_training_record


def end_training(copied: GraphModule, record: TrainingRecord) -> None:
    """Fix the ranges and fold batch norms, in place.

    Args:
        copied: A copy of the trained module with a graph of its own; it gets tensors of its own.
        record: Of the trained module.

    Raises:
        CalibrationError: The module has never run, and has no ranges.
    """
    for path in {str(node.target) for node in copied.graph.find_nodes(op="call_module")}:
        module: Any = copied.get_submodule(path)
        if isinstance(module, FakeQuantizeBase) and is_measured(module):
            if not has_range(module):
                raise CalibrationError(
                    "the module from prepare_qat() has not run yet, so the ranges of its "
                    "activations are unknown: train it before convert()"
                )
            copied.add_submodule(path, TrainedRange(module))
        else:
            copied.add_submodule(path, copy.deepcopy(module))
    _torch_compat.clone_tensors(copied)
    forget_training_record(copied)
    fold_batch_norms(copied, record.batch_norms)
