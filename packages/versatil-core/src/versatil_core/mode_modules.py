"""Operators that act otherwise in training, as modules that follow ``train()`` and ``eval()``.

``torch.export`` writes the mode of a batch norm or a dropout into its graph as a constant. As modules they are what
they were in the float model: the mode is theirs, and their statistics are where ``state_dict()`` finds them.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from versatil_core.annotations import rename_inputs
from versatil_core.parameter_names import add_constant, value_at
from versatil_passes.graph_queries import arguments_of, erase_unread, module_path_of

aten = torch.ops.aten

_TENSORS = ("weight", "bias", "running_mean", "running_var")
_COUNTER = "num_batches_tracked"
_DROPOUTS = frozenset(
    {
        aten.dropout.default,
        aten.dropout_.default,
        aten.feature_dropout.default,
        aten.feature_dropout_.default,
        aten.alpha_dropout.default,
        aten.alpha_dropout_.default,
        aten.feature_alpha_dropout.default,
        aten.feature_alpha_dropout_.default,
    }
)


class BatchNorm(torch.nn.Module):
    """A batch norm over any number of dimensions, the second of which has the channels.

    Args:
        tensors: ``weight``, ``bias``, ``running_mean`` and ``running_var``, float ``[channels]``, and
            ``num_batches_tracked``, int64 ``[]``; those that it hasn't are missing.
        momentum: Share of a new batch in the running statistics; None is the average over all batches.
        eps: Added to the variance.
        always_by_batch: Whether it takes the statistics of the batch in eval mode, too.

    Attributes:
        statistics_frozen: bool ``[]``; whether training takes the running statistics and leaves them as they are.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor
    statistics_frozen: torch.Tensor

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        momentum: float | None,
        eps: float,
        always_by_batch: bool,
    ) -> None:
        super().__init__()
        for name in _TENSORS:
            value = tensors.get(name)
            if isinstance(value, torch.nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)
        self.register_buffer(_COUNTER, tensors.get(_COUNTER, torch.tensor(0)))
        self.register_buffer("statistics_frozen", torch.tensor(False))
        self.momentum = momentum
        self.eps = eps
        self.always_by_batch = always_by_batch

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Weight, bias and running statistics by their names."""
        return {name: getattr(self, name) for name in _TENSORS}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize float ``[batch, channels, ...]``; in training, learn the running statistics."""
        is_learning = self.training and not bool(self.statistics_frozen)
        momentum = self.momentum
        if is_learning:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1 / int(self.num_batches_tracked)
        return torch.nn.functional.batch_norm(
            x,
            training=is_learning or self.always_by_batch,
            momentum=momentum or 0.0,
            eps=self.eps,
            **self.tensors,
        )

    def extra_repr(self) -> str:
        """The options."""
        return f"eps={self.eps}, momentum={self.momentum}"


class Dropout(torch.nn.Module):
    """Dropout of any kind, in training only.

    Args:
        operator: One of ``aten``, which takes a tensor, a probability and whether it is in training.
        p: Probability.
    """

    def __init__(self, operator: Any, p: float) -> None:
        super().__init__()
        self.operator = operator
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a float tensor to one of the same shape."""
        result: torch.Tensor = self.operator(x, self.p, self.training)
        return result

    def extra_repr(self) -> str:
        """The options."""
        return f"{self.operator}, p={self.p}"


def put_batch_norms(exported: GraphModule, model: torch.nn.Module | None = None) -> None:
    """Replace each batch norm by a module, in place; one that is called twice stays one.

    Args:
        exported: A model that was exported in eval mode.
        model: The model, if it is going to be trained: it knows what a graph in eval mode doesn't say.
    """
    modules = {} if model is None else dict(model.named_modules())
    paths: dict[Any, str] = {}
    for node in exported.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        arguments = arguments_of(node)
        nodes = {name: arguments[name] for name in _TENSORS}
        key = (*(value and value.target for value in nodes.values()), arguments["eps"])
        if key not in paths:
            source = modules.get(module_path_of(node))
            is_module = isinstance(getattr(source, "running_mean", None), torch.Tensor)
            # A graph in eval mode has 0.0 for the average over all batches.
            momentum = getattr(source, "momentum", None) if is_module else arguments["momentum"]
            paths[key] = _put_batch_norm(exported, node, nodes, momentum)
        _call_instead(node, paths[key], arguments["input"])
        erase_unread(nodes.values())
    exported.recompile()


def _put_batch_norm(
    exported: GraphModule, node: Node, nodes: Mapping[str, Node | None], momentum: float | None
) -> str:
    arguments = arguments_of(node)
    tensors = {
        name: value_at(exported, str(value.target))
        for name, value in nodes.items()
        if value is not None
    }
    path = module_path_of(node)
    if _is_at_home(exported, path, nodes):
        counter = f"{path}.{_COUNTER}"
        buffers = dict(exported.named_buffers())
        if counter in buffers:
            tensors[_COUNTER] = buffers[counter]
        erase_unread(
            [get for get in exported.graph.find_nodes(op="get_attr") if get.target == counter]
        )
    else:
        path = _free_path(exported, "batch_norm")
    always = bool(arguments["training"])
    norm = BatchNorm(tensors, momentum=momentum, eps=arguments["eps"], always_by_batch=always)
    exported.add_submodule(path, norm)
    return path


def _is_at_home(exported: GraphModule, path: str, nodes: Mapping[str, Node | None]) -> bool:
    """Whether the module at a path has nothing but the tensors of one batch norm."""
    read = [(name, str(value.target)) for name, value in nodes.items() if value is not None]
    if not path or not read or any(target != f"{path}.{name}" for name, target in read):
        return False
    home = exported.get_submodule(path)
    state = [name for name, _ in (*home.named_parameters(), *home.named_buffers())]
    return {*state} <= {*_TENSORS, _COUNTER} and not [*home.children()]


def _free_path(module: GraphModule, stem: str) -> str:
    numbered = (f"{stem}_{number}" for number in itertools.count(1))
    return next(path for path in itertools.chain([stem], numbered) if not hasattr(module, path))


def put_dropouts(prepared: GraphModule) -> None:
    """Replace each dropout by a module, in place, unless it is active in eval mode, too.

    Args:
        prepared: A model that was exported in eval mode.
    """
    new = {}
    for node in [*prepared.graph.nodes]:
        if node.op == "call_function" and node.target in _DROPOUTS and not node.args[2]:
            x, p, _ = node.args
            path = _free_path(prepared, "dropout")
            prepared.add_submodule(path, Dropout(node.target, p))
            new[node] = _call_instead(node, path, x)
    rename_inputs(prepared.graph, new)
    prepared.recompile()


def restore_operators(reference: GraphModule) -> None:
    """Turn the modules of :func:`put_batch_norms` and :func:`put_dropouts` into operators in eval mode, in place.

    Args:
        reference: A converted model.
    """
    found = {
        node: reference.get_submodule(str(node.target))
        for node in reference.graph.find_nodes(op="call_module")
    }
    norms: dict[str, BatchNorm] = {}
    for node, module in found.items():
        if isinstance(module, Dropout):
            _become(node, module.operator, (node.args[0], module.p, False))
        elif isinstance(module, BatchNorm):
            norms[str(node.target)] = module
            _become(node, aten.batch_norm.default, _batch_norm_arguments(node, module))
    for path, norm in norms.items():
        reference.add_submodule(path, torch.nn.Module())
        for name, value in norm.tensors.items():
            if value is not None:
                add_constant(reference, f"{path}.{name}", value)
    reference.recompile()


def _batch_norm_arguments(node: Node, norm: BatchNorm) -> tuple[Any, ...]:
    with node.graph.inserting_before(node):
        tensors = [
            None if value is None else node.graph.get_attr(f"{node.target}.{name}")
            for name, value in norm.tensors.items()
        ]
    return (node.args[0], *tensors, norm.always_by_batch, norm.momentum or 0.0, norm.eps, False)


def _become(node: Node, operator: Any, args: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(operator, args)
    _replace(node, new)


def _call_instead(node: Node, path: str, x: Any) -> Node:
    with node.graph.inserting_before(node):
        new = node.graph.call_module(path, (x,))
    _replace(node, new)
    return new


def _replace(node: Node, new: Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
