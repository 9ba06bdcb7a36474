"""A program from elsewhere can name nothing but operators, and compute nothing but sizes."""

import json
from typing import Any

import pytest
import torch
from torch.export import Dim

from versatil_core._torch_compat import register_quantized_ops
from versatil_core.program_check import PRIVATE_NOTES, check_program, check_target
from versatil_core.size_expressions import ProgramError, check_expression


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.linear.default",
        "torch.ops.quantized_decomposed.quantize_per_tensor.tensor",
        "torch.ops.aten.__and__.Tensor",
        "torch.ops.higher_order.cond",
        "_operator.getitem",
        "torch.sym_max",
        "torch._sym_sqrt",
        "math.ceil",
    ],
)
def test_operators(target: str) -> None:
    register_quantized_ops()

    check_target(target)


@pytest.mark.parametrize(
    "target",
    [
        "torch.serialization.os.system",
        "torch.hub.load",
        "torch.load",
        "torch.ops.load_library",
        "torch.ops.load_library.__call__",
        "torch.ops.import_module.evil",
        "torch.ops.higher_order.flat_apply",
        "torch.ops.unknown.op.default",
        "torch.ops.aten.__class__.mro.x",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten._reshape_alias.default",
        "torch.ops.prim.Print.default",
        "torch.ops.aten.linear.default.__globals__",
        "_operator.methodcaller",
        "_operator.attrgetter",
        "math.factorial",
        "builtins.eval",
        "#custom",
        "eval",
        "",
        "torch.ops.aten.linear.default\nx",
    ],
)
def test_what_is_no_operator(target: str) -> None:
    with pytest.raises(ProgramError, match="no operator"):
        check_target(target)


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s0', positive=True, integer=True)",
        "Mul(Integer(24), Symbol('s53', positive=True, integer=True))",
        "Add(Symbol('s0', integer=True), Integer(-1))",
        "Pow(Symbol('s0'), Integer(2))",
        "s0**2",
        "(s0 + 1)//2",
        "L['x'].size()[0] <= 64",
        "L['args'][0]['more things'].size()[1] == 2*L['y'].size()[0]",
        "Max(1, L['x'].size()[0]) >= 2 and not (L['x'].stride()[0] == 7)",
        "math.ceil(L['x'].size()[0] / 2) < 4",
        "L['x'].size()[1] != torch.sym_max(1, (1 + L['x'].size()[1]) // 2)",  # torch 2.14
        "torch.sym_float(L['x'].size()[0]) < torch._sym_sqrt(L['x'].size()[1])",
        "FloorDiv(Symbol('s0', positive=True, integer=True), Integer(2))",
        "1.5e3",
    ],
)
def test_arithmetic(text: str) -> None:
    check_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "sympify('1')",
        "lambdify(x, y)",
        "(lambda: 0)()",
        "[x for x in L]",
        "L['x'].__class__",
        "L['x'].size.__globals__",
        "math.__loader__",
        "Symbol('\"); evil(')",
        "Symbol(\"'); evil('\")",
        "f'{x}'",
        "x if y else z",
        "(x := 1)",
        "10**10**10",
        "9**99",
        "Pow(Integer(10), Integer(99999999999))",
        "PowByNatural(Integer(10), Symbol('s0'))",
        "((2**3)**3)",
        "2**3 + 2**3 + 2**3",
        "Float('1.0', precision=10**9)",
        "Float('1.1', 999999999)",
        "9^9^9",
        "1e999999999",
        "1e300",
        "Tuple('1e999999999')",
        "Float('1.0', precision=1000000)",
        "Rational('1e999999999')",
        "Integer('9' * 9)",
        "LShift(Integer(1), Integer(9999999999))",
        "Mul(" + ", ".join(f"Add(Symbol('s{n}'), 1)" for n in range(7)) + ")",
        "Max(" + ", ".join(f"s{n}" for n in range(13)) + ")",
        "torch.sym_max(" + ", ".join(f"s{n}" for n in range(13)) + ")",
        "Mul(" + ", ".join(f"Symbol('s{n}')" for n in range(9)) + ")",
        "1 << 2**60",
        "9" * 40,
        "open('x')",
        "getattr(L, 'x')",
        "L['x'].tolist()",
        "print()",
        "size()()",
        "b'x'",
        "...",
    ],
)
def test_more_than_arithmetic(text: str) -> None:
    with pytest.raises(ProgramError, match="more than arithmetic"):
        check_expression(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 +", "is no expression"),
        ("x = 1", "is no expression"),
        ("\0", "is no expression"),
        ("1 + " * 9000 + "1", "36001 characters"),
        ("-" * 15_000 + "1", "is no expression|too deeply"),
    ],
)
def test_what_is_no_expression(text: str, reason: str) -> None:
    with pytest.raises(ProgramError, match=reason):
        check_expression(text)


@pytest.mark.parametrize(
    "text", [b'{"in_spec": "[1, {}]"}', b"{", b"[" * 100_000, b'{"in_spec": "{"}', b"\xff"]
)
def test_no_program(text: bytes) -> None:
    with pytest.raises(ProgramError):
        check_program(text)


@pytest.mark.parametrize(
    "program",
    [
        {"inputs": [{"as_tensor": {"name": "x=exit()"}}]},
        {"forward_arg_names": ["x: exit()"]},
        {"buffer_name": 'a"); exit(); ("'},
        {"fqn": "a\nexit()"},
        {"tensor_values": {"'+exit()+'": {}}},
        {"as_operator": "torch.hub.load"},
        {
            "in_spec": json.dumps(
                [1, {"type": "builtins.dict", "context": json.dumps(["a=exit()"])}]
            )
        },
        {"in_spec": json.dumps([1, {"type": "x'", "context": "null"}])},
        {"out_spec": json.dumps([1, {"context": json.dumps({"default_factory_module": "this"})}])},
        {"out_spec": json.dumps([1, {"context": {"__enum__": True, "fqn": "evil:X"}}])},
        {
            "out_spec": json.dumps(
                [1, {"context": json.dumps([{"__enum__": True, "fqn": "evil:X"}])}]
            )
        },
        {"something_new": '"+exit()+"'},
        {"constant_input": {"value": {"as_string": "abc' #\n, 'm')\n  exit()"}}},
        {"range_constraints": {"exit()": {}}},
    ],
)
def test_names_that_would_be_code(program: dict[str, Any]) -> None:
    with pytest.raises(
        ProgramError, match=r"into code|no operator|no plain key|inputs nest|arithmetic"
    ):
        check_program(json.dumps(program).encode())


def test_the_checks_reach_everywhere() -> None:
    program = {"a": [{"b": {"nodes": [{"target": "torch.hub.load"}]}}]}
    with pytest.raises(ProgramError, match=r"torch\.hub\.load"):
        check_program(json.dumps(program).encode())

    guards: dict[str, Any] = {"guards_code": ["1 < 2", "open('x')"]}
    with pytest.raises(ProgramError, match="open"):
        check_program(json.dumps(guards).encode())


class Sizes(torch.nn.Module):
    """Computes with sizes in many ways."""

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        rows, columns = x.shape
        y = x.reshape(rows // 2, 2, columns)[:, :, : (columns + 1) // 2].mean() * rows**2
        return y + torch.arange(max(rows, columns)).sum() / (rows * 0.5) + more["a b"].sum()


def test_what_torch_writes_is_accepted() -> None:
    from torch._export.serde.serialize import serialize

    x, auto = torch.randn(8, 6), {0: Dim.AUTO, 1: Dim.AUTO}
    program = torch.export.export(Sizes(), (x, {"a b": x}), dynamic_shapes=(auto, {"a b": auto}))
    for node in program.graph.nodes:
        for note in PRIVATE_NOTES:
            node.meta.pop(note, None)
    text = serialize(program).exported_program
    assert text.count(b"expr_str") > 5
    assert b"guards_code" in text

    check_program(text)
