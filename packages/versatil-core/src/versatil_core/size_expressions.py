"""Arithmetic on sizes, as torch writes it into exported programs, and nothing that is more.

Torch evaluates the texts of sizes and guards as Python, and sympy simplifies them.
"""

import ast
import re

# What can stand in generated code, between quotes of either kind, or as a name, and do nothing there.
TEXT = re.compile(r"[^'\"\\#\x00-\x1f\x7f]{0,1000}")
IDENTIFIER = re.compile(r"[A-Za-z_]\w{0,1000}|")
# What torch.export writes for sizes (sympy's srepr) and for guards (torch's printer).
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow"})
_BRANCHES = frozenset({"Max", "Min", "And", "Or", "Piecewise", "ExprCondPair", "Where"})
_NUMBERS = frozenset({"Integer", "Float", "Rational"})
_FUNCTIONS = (
    _POWERS
    | _BRANCHES
    | _NUMBERS
    | {
        *("Symbol", "Add", "Mul", "Mod", "Abs", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv"),
        *("ModularIndexing", "Tuple", "floor", "ceiling", "FloorToInt", "CeilToInt", "RoundToInt"),
        *("TruncToInt", "TruncToFloat", "RoundDecimal", "ToFloat", "IntTrueDiv", "FloatTrueDiv"),
        *("Identity", "OpaqueUnaryFn_sqrt", "Not", "Eq", "Ne", "Equality", "Unequality", "Lt"),
        *("Le", "Gt", "Ge", "StrictLessThan", "StrictGreaterThan", "LessThan", "GreaterThan"),
        *("float", "int", "abs", "max", "min", "cast_symbool_to_symint_guardless"),
    }
)
_METHODS = frozenset({"size", "stride", "storage_offset", "dim", "item"})
_MATH = frozenset({"ceil", "floor", "trunc", "sqrt"})
# Of torch, where the result may be symbolic: torch.sym_max(1, ...), from torch 2.14 on.
_SYMBOLIC = {"sym_max": "Max", "sym_min": "Min", "sym_float": "", "_sym_sqrt": ""}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Pow: "Pow",
    ast.Mult: "Mul",
    ast.Add: "Add",
    ast.Sub: "Add",
}
_NUMBER = re.compile(r"[+-]?\d{1,20}(\.\d{0,40})?(e[+-]?\d{1,2})?")
_MAX_NUMBER = 2**64
# Sympy multiplies sums out, which takes exponentially long; real sizes have one or two of each.
_MAX_EXPRESSION = 20_000
_MAX_EXPONENT = 3
_MAX_POWERS = 2
_MAX_SUMS = 6
_MAX_BRANCHES = 12
_MAX_SYMBOLS = 8


class ProgramError(ValueError):
    """A program contains what no exported program has."""


def check_expression(text: str) -> None:
    """Check that an expression is arithmetic on sizes.

    Raises:
        ProgramError: It is more, or too large to evaluate.

    Example:
        >>> check_expression("L['x'].size()[0] <= 64")
    """
    if len(text) > _MAX_EXPRESSION:
        raise ProgramError(f"an expression has {len(text)} characters: {text[:80]!r}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError) as error:
        raise ProgramError(f"{text[:80]!r} is no expression: {error}") from error
    nodes = list(ast.walk(tree.body))
    if not all(map(_is_arithmetic, nodes)) or _takes_too_long(nodes):
        raise ProgramError(f"the expression {text[:80]!r} is more than arithmetic on sizes")


def _is_arithmetic(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            return re.fullmatch(r"[A-Za-z]\w{0,50}", name) is not None
        case ast.Constant(value=value):
            return _is_plain(value)
        case ast.Call(func=ast.Name(id=name)):
            return name in _FUNCTIONS and _takes_arguments(name, node.args)
        case ast.keyword(value=value):
            # Whether a symbol is an integer, and how precise a number is.
            return isinstance(value, ast.Constant) and value.value in range(100)
        case ast.Attribute(attr=name):
            return name in _METHODS | _MATH | _SYMBOLIC.keys()
        case _:
            return _is_plain_node(node) or _is_method_call(node)


def _is_plain_node(node: ast.AST) -> bool:
    operands = [node.left, node.right] if isinstance(node, ast.BinOp) else []
    return isinstance(node, _PLAIN_NODES) and not any(map(_is_text, operands))


def _is_method_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return TEXT.fullmatch(value) is not None
    if isinstance(value, int):
        return abs(value) <= _MAX_NUMBER
    # Sympy makes a fraction of it, with all the digits that an exponent stands for.
    return isinstance(value, float) and (value == 0 or 1e-30 < abs(value) < 1e30)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _takes_arguments(function: str, arguments: list[ast.expr]) -> bool:
    """Whether texts among the arguments are what the function takes: a name or a number."""
    if function == "Float" and len(arguments) != 1:
        return False  # the second would be the number of digits
    texts = [node.value for node in arguments if isinstance(node, ast.Constant)]
    form = {"Symbol": IDENTIFIER} | dict.fromkeys(_NUMBERS, _NUMBER)
    return all(
        function in form and form[function].fullmatch(text) is not None
        for text in texts
        if isinstance(text, str)
    )


def _takes_too_long(nodes: list[ast.AST]) -> bool:
    powers = [node for node in nodes if _called(node) in _POWERS]
    if any(_called(inner) in _POWERS for power in powers for inner in list(ast.walk(power))[1:]):
        return True
    factors = [part for node in nodes if _called(node) == "Mul" for part in _parts(node)]
    sums = [part for part in factors if any(_called(node) == "Add" for node in ast.walk(part))]
    branches = [part for node in nodes if _called(node) in _BRANCHES for part in _parts(node)]
    symbols = {ast.dump(node) for node in nodes if _called(node) == "Symbol"}
    return (
        any(_exponent(power) > _MAX_EXPONENT for power in powers)
        or len(powers) > _MAX_POWERS
        or len(sums) > _MAX_SUMS
        or len(branches) > _MAX_BRANCHES
        or len(symbols) > _MAX_SYMBOLS
    )


def _called(node: ast.AST) -> str:
    """Return the function that a node calls; operators have the names of sympy's functions."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name
        case ast.Call(func=ast.Attribute(attr=name)):
            return _SYMBOLIC.get(name, "")
        case ast.BinOp(op=operator):
            return _OPERATORS.get(type(operator), "")
        case ast.BoolOp():
            return "And"
        case _:
            return ""


def _parts(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.Call():
            return [*node.args]
        case ast.BoolOp():
            return [*node.values]
        case _:
            return [*ast.iter_child_nodes(node)]


def _exponent(power: ast.AST) -> float:
    """Return the size of an exponent; infinite if it is not written as a number."""
    exponent = power.right if isinstance(power, ast.BinOp) else _parts(power)[-1]
    if _called(exponent) in {"Integer", "Rational"}:
        exponent = _parts(exponent)[0]
    if isinstance(exponent, ast.UnaryOp):
        exponent = exponent.operand
    value = exponent.value if isinstance(exponent, ast.Constant) else None
    return abs(value) if isinstance(value, int | float) else float("inf")


_PLAIN_NODES = (
    *(ast.expr_context, ast.unaryop, ast.boolop, ast.cmpop, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.Subscript, ast.Tuple, ast.List),
)
