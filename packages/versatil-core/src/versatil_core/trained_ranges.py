"""The ranges of fake quantization: measured in training, kept in eval mode, frozen, and handed to the reference."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torchao.quantization.pt2e import (
    FakeQuantize,
    FakeQuantizeBase,
    FusedMovingAvgObsFakeQuantize,
    ObserverBase,
)

_PAUSED = "_versatil_is_paused"


def fakes_of(module: torch.nn.Module) -> Iterator[FakeQuantizeBase]:
    """All fake quantization in a module."""
    return (each for each in module.modules() if isinstance(each, FakeQuantizeBase))


def plain_observers(prepared: GraphModule) -> list[str]:
    """Names of the classes of observers that round nothing, which are no use in training."""
    called = {str(node.target) for node in prepared.graph.find_nodes(op="call_module")}
    modules = (prepared.get_submodule(path) for path in sorted(called))
    return sorted({type(each).__name__ for each in modules if isinstance(each, ObserverBase)})


def make_weights_symmetric(prepared: GraphModule) -> None:
    """Let the fake quantization of symmetric values do what it says, in place, before anything runs.

    torch's fused operator gives a channel whose weights all have one sign a zero point other than 0, for which no
    int8 kernel is made. And its range is an average over many steps, also where the value is known: a weight that
    grows would be clipped.

    Args:
        prepared: As torchao made it: a weight is the input of its fake quantization.
    """
    for node in prepared.graph.find_nodes(op="call_module"):
        fused: Any = prepared.get_submodule(str(node.target))
        if isinstance(fused, FusedMovingAvgObsFakeQuantize) and fused.is_symmetric_quant:
            observer = fused.activation_post_process
            if node.args[0].op == "get_attr":
                observer.averaging_constant = 1.0
            prepared.add_submodule(
                str(node.target), FakeQuantize(lambda observer=observer, **_: observer)
            )


def keep_ranges_in_eval(prepared: GraphModule) -> None:
    """Let fake quantization measure in training only, in place.

    torchao's measures in both modes: evaluating would train. The exception is a first call in eval mode, without
    which there would be no range.
    """
    for fake in fakes_of(prepared):
        if is_measured(fake):
            fake.register_forward_pre_hook(_pause)
            fake.register_forward_hook(_resume, always_call=True)
        elif hasattr(fake, "activation_post_process"):
            fake.register_forward_pre_hook(_measure_anew)


def is_measured(fake: FakeQuantizeBase) -> bool:
    """Whether a range is an average over calls, and not that of each call, or of the weight itself."""
    return not getattr(fake, "is_dynamic", False) and hasattr(fake, "activation_post_process")


def has_range(fake: Any) -> bool:
    """Whether a measured range is there."""
    smallest = getattr(fake.activation_post_process, "min_val", None)
    return smallest is None or bool(smallest.numel() and torch.isfinite(smallest).all())


def has_all_ranges(module: torch.nn.Module) -> bool:
    """Whether every range that is measured in training is there."""
    return all(has_range(fake) for fake in fakes_of(module) if is_measured(fake))


def _measure_anew(fake: Any, _: Any) -> None:
    """Forget the last call: torchao adds the difference to it, which is not quite the range of this one."""
    fake.activation_post_process.reset_min_max_vals()


def _pause(fake: Any, _: Any) -> None:
    if not fake.training and fake.observer_enabled[0] == 1 and has_range(fake):
        fake.disable_observer()
        setattr(fake, _PAUSED, True)


def _resume(fake: Any, *_: Any) -> None:
    if getattr(fake, _PAUSED, False):
        fake.enable_observer()
        setattr(fake, _PAUSED, False)


def freeze(module: torch.nn.Module) -> None:
    """Keep all ranges as they are, but those that are measured at each call."""
    for fake in fakes_of(module):
        if not getattr(fake, "is_dynamic", False):
            fake.disable_observer()


class TrainedRange(ObserverBase):
    """Stands for a fake quantization, with the scale with which it rounded.

    torchao's own computes the scale anew from the smallest and largest value when it is converted, in other steps
    than the operator that rounds in training.

    Args:
        fake: What it stands for.
    """

    def __init__(self, fake: Any) -> None:
        super().__init__(fake.dtype, is_dynamic=False)
        self.qscheme = fake.qscheme
        self.quant_min = fake.quant_min
        self.quant_max = fake.quant_max
        self.ch_axis = fake.ch_axis
        self.register_buffer("scale", fake.scale.detach().clone())
        self.register_buffer("zero_point", fake.zero_point.detach().to(torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``: it is converted, not run."""
        return x

    def calculate_qparams(self, **_: Any) -> tuple[Any, Any]:
        """The scale and the zero point."""
        return self.scale, self.zero_point
