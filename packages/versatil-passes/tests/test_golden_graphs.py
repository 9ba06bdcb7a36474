"""Each fused form as text that a person can review: ``pytest packages/versatil-passes/tests --update-golden``."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from versatil_passes import Int8Lowering, OneDNNKernels

GOLDEN = Path(__file__).parent / "golden"


def test_golden_graphs(form: Any, build: Any, request: pytest.FixtureRequest) -> None:
    """Each form becomes one int8 operator, and then the kernel that compiled models run."""
    module, _ = form.build()

    record = Int8Lowering(build.rules)(module.graph)
    lowered = describe(module.graph)
    OneDNNKernels()(module.graph)

    (op,) = record.lowered
    assert (op.post_ops, op.output_dtype) == (form.post_ops, form.output_dtype)
    assert record.declined == ()
    kernels = describe(module.graph)
    text = f"{op}\n\n# after Int8Lowering\n{lowered}\n# after OneDNNKernels\n{kernels}"
    path = GOLDEN / f"{request.node.callspec.id}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"no {path.name}: run pytest --update-golden and review what it wrote"
    assert text == path.read_text(encoding="utf-8"), "run pytest --update-golden and review"


def test_every_golden_graph_has_its_form(build: Any) -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == build.forms.keys()


def describe(graph: Graph) -> str:
    """One line for each node, with names that only depend on the ops, and arguments by their names in the schema."""
    counts: Counter[str] = Counter()
    names: dict[Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "call_module":  # the guards that torch.export adds, different in each version
            continue
        lines.append(_line(node, names, counts))
    return "\n".join(lines) + "\n"


def _line(node: Node, names: dict[Node, str], counts: Counter[str]) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0], names)}"
    base = node.target if isinstance(node.target, str) else node.target.__name__.split(".")[0]
    count = counts[str(base)]
    counts[str(base)] += 1
    names[node] = f"%{base}_{count}" if count else f"%{base}"
    if node.op in {"placeholder", "get_attr"}:
        return f"{names[node]} = {node.op} {_shape(node)}"
    if not isinstance(node.target, torch._ops.OpOverload):
        return f"{names[node]} = {base}{_text(node.args, names)}"
    schema = node.target._schema
    arguments = {
        **{known.name: value for known, value in zip(schema.arguments, node.args, strict=False)},
        **node.kwargs,
    }
    shown = ", ".join(f"{name}={_text(value, names)}" for name, value in arguments.items())
    return f"{names[node]} = {node.target}({shown}) {_shape(node)}".rstrip()


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _text(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, names) for item in value)}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
