"""How much to move from activations into weights: the exponent that suits the calibration data.

For the input channel j of the linear layers that read X, the factor is

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

(Xiao et al., "SmoothQuant", 2022, arXiv:2211.10438, equation 4); X is divided by it and W is
multiplied by it. Ours are rounded to powers of two, so that the float result is the same to the
last bit. The paper takes one alpha for a whole model; here each group of layers gets its own.

An alpha is judged by data that its factors and ranges were not made from, half against half:
channels that are rarely active look as if much could be gained, until the next batch comes.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from versatil_core._torch_compat import register_quantized_ops
from versatil_core.equalization_groups import LinearGroup, weight_of
from versatil_core.export import ModelInputs
from versatil_core.recorded_values import copies_of

COARSE_ALPHAS = tuple(step / 10 for step in range(11))
FINE_STEP = 0.05
MAX_ROWS = 512
"""Of each batch: more of its rows, chosen by chance, aren't kept."""

Rows = Sequence[torch.Tensor]  # float [rows, in_features], one tensor for each batch


@dataclass(frozen=True)
class Found:
    """What the search found for one group.

    Attributes:
        alpha: The exponent; None if leaving the group as it is is best.
        gain_db: By how much the error of the layers' outputs becomes less, on data that the
            factors weren't made from.
    """

    alpha: float | None
    gain_db: float


class InputRecorder(Interpreter):
    """Runs an exported module, and keeps rows of what groups of linear layers read.

    Attributes:
        rows: Group's source -> the rows of each batch.
    """

    def __init__(self, exported: GraphModule, groups: Iterable[LinearGroup]) -> None:
        super().__init__(exported)
        self.rows: dict[Node, list[torch.Tensor]] = {group.source: [] for group in groups}

    def record(self, call: ModelInputs) -> None:
        """Run one batch."""
        self.run(*copies_of(call.leaves), enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        """Keep rows of the value, too."""
        value = super().run_node(n)
        if n in self.rows:
            rows = value.detach().reshape(-1, value.shape[-1])
            generator = torch.Generator().manual_seed(0)
            kept = torch.randperm(len(rows), generator=generator)[:MAX_ROWS]
            self.rows[n].append(rows[kept].float())
        return value


class GroupSimulation:
    """Computes what quantizing the layers of one group does to their outputs.

    Args:
        group: The layers.
        prepared: The same model with the observers of its backends, which are only copied.
    """

    def __init__(self, group: LinearGroup, prepared: GraphModule) -> None:
        nodes = {node.name: node for node in prepared.graph.nodes}
        self.weights = [weight_of(layer).float() for layer in group.layers]
        self._observers = [_observers(prepared, nodes.get(layer.name)) for layer in group.layers]

    @property
    def fault(self) -> str:
        """Why it can't be computed; ``""`` if it can."""
        quantized = [pair for pair in self._observers if pair is not None]
        if not quantized:
            return "none of its layers is quantized"
        for observer in (observer for pair in quantized for observer in pair):
            if None in (getattr(observer, "quant_min", None), getattr(observer, "quant_max", None)):
                return f"what {type(observer).__name__} does can't be simulated"
        return ""

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale of the activation is measured at every call."""
        return any(pair is not None and pair[0].is_dynamic for pair in self._observers)

    def error(self, alpha: float | None, fit: Rows, judge: Rows) -> float:
        """Sum of squared errors over sum of squares, added up over the layers' outputs.

        Args:
            alpha: The exponent; None changes nothing.
            fit: What factors and ranges are made from.
            judge: What goes through the layers.
        """
        ones = torch.ones(self.weights[0].shape[1])
        factors = ones if alpha is None else factors_of(fit, self.weights, alpha)
        inputs = torch.cat([*judge])
        total = 0.0
        rounded: dict[int, torch.Tensor] = {}
        for weight, pair in zip(self.weights, self._observers, strict=True):
            if pair is None:
                continue
            activation, of_weight = pair
            if id(activation) not in rounded:  # layers that read one tensor share its observer
                scaled = [[rows / factors for rows in part] for part in (fit, judge)]
                rounded[id(activation)] = _rounded_activations(activation, *scaled)
            expected = inputs @ weight.T
            got = rounded[id(activation)] @ _rounded_weight(of_weight, weight * factors).T
            signal = float(expected.square().sum())
            total += float((got - expected).square().sum()) / signal if signal else 0.0
        return total


def search(simulation: GroupSimulation, rows: Rows) -> Found:
    """Find the exponent with the least error; changing nothing is one of the candidates.

    Args:
        simulation: Of the group, without a fault.
        rows: What the group reads, at least two rows together.
    """
    halves = _halves(rows)
    errors: dict[float | None, float] = {}

    def try_all(alphas: Iterable[float | None]) -> float | None:
        for alpha in alphas:
            if alpha not in errors:
                errors[alpha] = sum(
                    simulation.error(alpha, fit, judge) for fit, judge in (halves, halves[::-1])
                )
        return min(errors, key=errors.__getitem__)

    coarse = try_all([None, *COARSE_ALPHAS])
    best = coarse
    if coarse is not None:
        near = (round(coarse + step, 2) for step in (-FINE_STEP, FINE_STEP))
        best = try_all(alpha for alpha in near if 0 <= alpha <= 1)
    gain = errors[None] / errors[best] if errors[best] else 1.0
    return Found(best, 10 * math.log10(gain) if gain > 0 else 0.0)


def factors_of(rows: Rows, weights: Sequence[torch.Tensor], alpha: float) -> torch.Tensor:
    """The factors of a group: powers of two, around 1, float ``[in_features]``.

    A channel that is always zero, in the activations or in all weights, gets a factor like the
    others' mean.

    Args:
        rows: What the group reads.
        weights: Of its layers, each float ``[out_features, in_features]``.
        alpha: 0 makes the weights' channels equally large, 1 the activations'.
    """
    of_inputs = torch.stack([part.abs().amax(0) for part in rows]).amax(0).double()
    of_weights = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).double()
    exponents = alpha * of_inputs.log2() - (1 - alpha) * of_weights.log2()
    is_usable = (of_inputs > 0) & (of_weights > 0) & exponents.isfinite()
    if not bool(is_usable.any()):
        return torch.ones(len(exponents))
    centred = exponents - exponents[is_usable].mean()
    return torch.where(is_usable, centred, 0.0).round().clamp(-20, 20).exp2().float()


def _halves(rows: Rows) -> tuple[Rows, Rows]:
    """Every other batch; of a single batch, every other row."""
    if len(rows) > 1:
        return rows[::2], rows[1::2]
    [batch] = rows
    return [batch[::2]], [batch[1::2]]


def _observers(prepared: GraphModule, layer: Node | None) -> tuple[Any, Any] | None:
    """What observes a layer's activation and weight; None if it isn't quantized."""
    if layer is None:
        return None
    nodes = [node for node in layer.args[:2] if isinstance(node, Node) and node.op == "call_module"]
    if len(nodes) != 2:
        return None
    activation, weight = (prepared.get_submodule(str(node.target)) for node in nodes)
    return activation, weight


def _rounded_activations(observer: Any, fit: Rows, judge: Rows) -> torch.Tensor:
    low, high = observer.quant_min, observer.quant_max
    if observer.is_dynamic:
        return torch.cat([_rounded_by_itself(observer, rows) for rows in judge])
    observer = copy.deepcopy(observer)
    for rows in fit:
        observer(rows)
    scale, zero_point = observer.calculate_qparams()
    return torch.fake_quantize_per_tensor_affine(
        torch.cat([*judge]), float(scale), int(zero_point), low, high
    )


def _rounded_by_itself(observer: Any, rows: torch.Tensor) -> torch.Tensor:
    """With a scale of these very values, as what ``convert_pt2e`` inserts for a dynamic backend."""
    register_quantized_ops()
    ops = torch.ops.quantized_decomposed
    is_affine = observer.qscheme in {torch.per_tensor_affine, None}
    choose = ops.choose_qparams.tensor if is_affine else ops.choose_qparams_symmetric.tensor
    eps = getattr(observer, "eps", torch.finfo(torch.float32).eps)
    low, high = observer.quant_min, observer.quant_max
    scale, zero_point = choose(rows, low, high, eps, observer.dtype)
    return torch.fake_quantize_per_tensor_affine(rows, float(scale), int(zero_point), low, high)


def _rounded_weight(observer: Any, weight: torch.Tensor) -> torch.Tensor:
    observer = copy.deepcopy(observer)
    observer(weight)
    scale, zero_point = observer.calculate_qparams()
    low, high = observer.quant_min, observer.quant_max
    if _is_per_channel(observer):
        zero_point = zero_point.to(torch.int32)
        return torch.fake_quantize_per_channel_affine(
            weight, scale, zero_point, observer.ch_axis, low, high
        )
    return torch.fake_quantize_per_tensor_affine(weight, float(scale), int(zero_point), low, high)


def rounds_outputs_alike(prepared: GraphModule, layer: Node) -> bool:
    """Whether a factor for an output channel of ``layer`` leaves its weight's rounding as it is.

    So it does where each output channel has a scale of its own, or where nothing is rounded.

    Args:
        prepared: The model with observers.
        layer: A linear layer of the exported model, or any other node.
    """
    nodes = {node.name: node for node in prepared.graph.nodes}
    pair = _observers(prepared, nodes.get(layer.name))
    return pair is None or _is_per_channel(pair[1])


def _is_per_channel(observer: Any) -> bool:
    schemes = {torch.per_channel_symmetric, torch.per_channel_affine}
    return getattr(observer, "qscheme", None) in schemes
