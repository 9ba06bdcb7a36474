"""Each fused form as text that a person can review: ``pytest packages/versatil-passes/tests --update-golden``."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from versatil_passes import (
    Int8Lowering,
    KeepInt8,
    LoweredOp,
    LoweringRules,
    PassChain,
    QuantizeLayerOutputs,
)

GOLDEN = Path(__file__).parent / "golden"
GEMM_RULES = LoweringRules(
    machine_types=("aarch64",),
    activation_dtypes=(torch.int8, torch.uint8),
    dynamic_ops=frozenset({"linear", "conv1d", "conv2d"}),
    post_ops={op: frozenset({"relu"}) for op in ("linear", "conv1d", "conv2d")},
    allow_int8_output=False,
    kernels="gemm",
    kernel_class="lowp_gemm:acl",
)
S8 = (0.03, 3, -128, 127, torch.int8)
GEMM_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemm_linear_relu_int8": ("linear", {"post_op": torch.relu, "output": S8, "activation": S8}),
    "gemm_linear_u8_dynamic": ("linear", {"is_dynamic": True}),
    "gemm_linear_one_scale": ("linear", {"post_op": torch.relu, "is_per_channel": False}),
    "gemm_conv1d": ("conv1d", {"activation": S8, "geometry": {"padding": 1, "stride": 2}}),
    "gemm_conv2d_pointwise": ("conv2d", {"kernel": 1, "geometry": {"stride": 2}}),
    "gemm_conv2d_u8_dynamic": ("conv2d", {"is_dynamic": True, "geometry": {"padding": (0, 1)}}),
}
ISLANDS: dict[str, Callable[..., Tensor]] = {
    "island_pool_relu": lambda layer, x: layer(F.max_pool2d(layer(x), 2).relu()),
    "island_cat": lambda layer, x: layer(torch.cat([layer(x), layer(x).relu()], 1)[:, 2:6]),
}


def test_golden_graphs(form: Any, build: Any, request: pytest.FixtureRequest) -> None:
    """Each form becomes one int8 operator, and then the kernel that compiled models run."""
    op = check_golden(form.build()[0], build.rules, request)

    assert (op.post_ops, op.output_dtype) == (form.post_ops, form.output_dtype)


@pytest.mark.parametrize("name", GEMM_FORMS)
def test_golden_products_of_matrices(name: str, build: Any, request: pytest.FixtureRequest) -> None:
    """The same where the kernel is a product of int8 matrices."""
    kind, options = GEMM_FORMS[name]
    op = check_golden(getattr(build, kind)(**options).build()[0], GEMM_RULES, request)

    assert op.post_ops == (("relu",) if "post_op" in options else ())
    assert op.output_dtype is torch.float32


@pytest.mark.parametrize("name", ISLANDS)
def test_golden_islands(name: str, build: Any, request: pytest.FixtureRequest) -> None:
    """What lies between layers runs on int8, so that each of them writes it, but for the last."""

    def layer(buffers: Any, x: Tensor) -> Tensor:
        return F.conv2d(build.through_int8(x, build.wide), build.dequantized(buffers))

    def island(buffers: Any, x: Tensor) -> Tensor:
        return ISLANDS[name](partial(layer, buffers), x)

    weight = build.int8_weight(4, 4, 1, 1)
    module = build.export(build.function(island, **weight), torch.randn(2, 4, 6, 6))
    lowering = Int8Lowering(build.rules)
    PassChain(QuantizeLayerOutputs(), KeepInt8(), lowering)(module.graph)

    compare(describe(module.graph), request)
    *others, last = [op.output_dtype for op in lowering.record.lowered]
    assert (set(others), last) == ({torch.uint8}, torch.float32)


def test_every_golden_graph_has_its_form(build: Any) -> None:
    names = {*build.forms, *GEMM_FORMS, *ISLANDS}
    assert {path.stem for path in GOLDEN.glob("*")} == names


def check_golden(
    module: GraphModule, rules: LoweringRules, request: pytest.FixtureRequest
) -> LoweredOp:
    """Compare the text of both halves of a lowering with the file of the test's name, or write it."""
    lowering = Int8Lowering(rules)
    record = lowering(module.graph)
    lowered = describe(module.graph)
    second_half = lowering.post_grad_pass
    second_half(module.graph)

    (op,) = record.lowered
    assert record.declined == ()
    kernels = describe(module.graph)
    name = type(second_half).__name__
    text = f"{op}\n\n# after Int8Lowering\n{lowered}\n# after {name}\n{kernels}"
    compare(text, request)
    return op


def compare(text: str, request: pytest.FixtureRequest) -> None:
    """Compare with the file of the test's name, or write it."""
    path = GOLDEN / f"{request.node.callspec.id}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"no {path.name}: run pytest --update-golden and review what it wrote"
    assert text == path.read_text(encoding="utf-8"), "run pytest --update-golden and review"


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
