"""Questions that passes ask about FX nodes: values, constants, views, mutation, where a node came from."""

import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

_VIEW_OPS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.flatten.using_ints,
        aten.expand.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.slice.Tensor,
        aten.select.int,
        torch.Tensor.view,
        torch.Tensor.reshape,
        torch.Tensor.permute,
        torch.Tensor.transpose,
        torch.Tensor.unsqueeze,
        torch.Tensor.squeeze,
        torch.Tensor.flatten,
        torch.Tensor.expand,
        torch.Tensor.contiguous,
        torch.Tensor.detach,
        torch.reshape,
        torch.permute,
        torch.transpose,
        torch.unsqueeze,
        torch.squeeze,
        torch.flatten,
    }
)
_PER_TENSOR_OPS = (
    "quantized_decomposed.quantize_per_tensor",
    "quantized_decomposed.dequantize_per_tensor",
)
_VIEW_METHODS = frozenset(
    {
        "view",
        "reshape",
        "permute",
        "transpose",
        "unsqueeze",
        "squeeze",
        "flatten",
        "expand",
        "contiguous",
        "detach",
        "t",
    }
)
_IN_PLACE_NAMES = (
    *("setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
)
_IN_PLACE_OPERATORS = frozenset(getattr(operator, name) for name in _IN_PLACE_NAMES)
_IN_PLACE_METHODS = frozenset(f"__{name}__" for name in _IN_PLACE_NAMES)


def is_view_like(node: Node) -> bool:
    """Whether ``node`` only moves or repeats elements of its first argument, whatever their dtype.

    ``view(dtype)`` reinterprets bytes and is therefore none of these.
    """
    known = node.target in (_VIEW_METHODS if node.op == "call_method" else _VIEW_OPS)
    moves_elements = known and node.op in ("call_function", "call_method")
    return (
        moves_elements
        and bool(node.args)
        and isinstance(node.args[0], Node)
        and not any(isinstance(arg, torch.dtype) for arg in (*node.args, *node.kwargs.values()))
    )


def is_mutating(node: Node) -> bool:
    """Whether ``node`` may write to one of its arguments."""
    if node.op not in {"call_function", "call_method"}:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if node.target in _IN_PLACE_OPERATORS or node.kwargs.get("out") is not None:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))


def is_written(node: Node) -> bool:
    """Whether an op writes to the value of ``node``, directly or through a view of it."""
    return any(
        _writes_to(user, node) or (is_view_like(user) and is_written(user)) for user in node.users
    )


def _writes_to(user: Node, argument: Node) -> bool:
    if not is_mutating(user):
        return False
    if not isinstance(user.target, torch._ops.OpOverload):
        return True  # a method or a function, with no schema to ask
    schema = user.target._schema.arguments
    given = {**dict(zip((a.name for a in schema), user.args, strict=False)), **user.kwargs}
    written = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return any(given.get(name) is argument for name in written)


def nodes_between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes after ``first`` and before ``last`` in the graph's order; ``first`` must stand before ``last``."""
    node = first.next
    while node is not last and node.op != "root":
        yield node
        node = node.next


def args_of(node: Node) -> tuple[Any, ...]:
    """The positional arguments, typed so that an operator's schema can be relied on."""
    return tuple(node.args)


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of an operator by their names in its schema, passed by position, by keyword or left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    known = node.target._schema.arguments
    given = {argument.name: value for argument, value in zip(known, node.args, strict=False)}
    given.update(node.kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in known}


def only_user(node: Node) -> Node | None:
    """The single node that reads ``node``, or ``None`` where there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def value_of(node: Node) -> torch.Tensor | None:
    """The fake tensor recorded for ``node`` by ``torch.export`` or Dynamo, or ``None``.

    ``convert_pt2e`` records none for the quantize and dequantize ops that it adds; they have their argument's shape.
    """
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        return value
    is_per_tensor = str(node.target).startswith(_PER_TENSOR_OPS) and node.op == "call_function"
    argument = value_of(node.args[0]) if is_per_tensor and isinstance(node.args[0], Node) else None
    if argument is None:
        return None
    is_quantize = str(node.target).startswith(_PER_TENSOR_OPS[0])
    dtype = node.args[5] if is_quantize else node.kwargs.get("out_dtype") or torch.float32
    return torch.empty_like(argument, dtype=dtype) if isinstance(dtype, torch.dtype) else None


def set_value(node: Node, value: Any) -> None:
    """Record ``value`` for ``node`` under the key that its graph uses."""
    node.meta["example_value" if "example_value" in node.meta else "val"] = value


def constant_of(node: Any) -> torch.Tensor | None:
    """The tensor that ``node`` always has (a ``get_attr``, or an ``aten.full`` of constants), or ``None``."""
    if not isinstance(node, Node):
        return None
    if node.op == "get_attr":
        value: Any = node.graph.owning_module
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        return value.detach() if isinstance(value, torch.Tensor) else None
    if node.op == "call_function" and node.target is aten.full.default and not node.all_input_nodes:
        size, fill = node.args
        return torch.full(size, fill, dtype=node.kwargs.get("dtype"))  # type: ignore[arg-type]
    return None


def module_path_of(node: Node) -> str:
    """Dotted path, as in ``named_modules()``, of the module whose forward made ``node``; ``""`` for the root."""
    return (module_paths_of(node) or [""])[-1]


def module_paths_of(node: Node) -> list[str]:
    """Dotted paths of the modules whose forward was running when ``node`` was traced, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [_dotted_path(str(entry[0])) for entry in stack.values()]


def _dotted_path(path: str) -> str:
    """Bring what torch's export modes write to the form of ``named_modules()``.

    Strict mode has written ``L['self'].encoder.0``, ``L['self']._modules['encoder'][0]`` and, where the model itself
    is a ``Sequential``, ``getattr(getattr(L['fn'], '0'), '1')`` (torch 2.9). A second call of one module is ``@1``.
    """
    path = re.sub(r"@\d+", "", path)
    innermost = re.compile(r"getattr\(([^()]*), '([^']+)'\)")
    while innermost.search(path):
        path = innermost.sub(r"\1.\2", path)
    path = re.sub(r"^L\['\w+'\]", "", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    return path.replace("._modules.", ".").strip(".")


def node_order(graph: Graph) -> dict[Node, int]:
    """Position of each node in the graph's order."""
    return {node: position for position, node in enumerate(graph.nodes)}


def erase_unread(nodes: Iterable[Any]) -> None:
    """Erase those of ``nodes`` that nobody reads any more, and the constants that only they read.

    Only for nodes without effects. (``Graph.eliminate_dead_code`` also drops in-place *methods* whose result is
    unused, such as ``x.add_(1)`` in a graph of Dynamo's.)
    """
    for node in dict.fromkeys(nodes):
        if isinstance(node, Node) and not node.users:
            constants = [argument for argument in node.all_input_nodes if argument.op == "get_attr"]
            node.graph.erase_node(node)
            erase_unread(constants)
