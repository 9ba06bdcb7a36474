"""What the text of an exported program may contain, so that loading it runs nothing but operators.

A program names functions by dotted paths below ``torch``, holds sizes and guards as expressions that torch evaluates
as Python, and its names become those of generated Python. A file from elsewhere could name
``torch.serialization.os.system`` there, or an input ``x=exit()``.
"""

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

# What torch.export writes for sizes (sympy's srepr) and for guards (torch's printer).
_FUNCTIONS = frozenset(
    {
        *(
            "Symbol",
            "Integer",
            "Float",
            "Rational",
            "Add",
            "Mul",
            "Pow",
            "Max",
            "Min",
            "Mod",
            "Abs",
        ),
        *("PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "ModularIndexing", "Where", "Piecewise"),
        *("ExprCondPair", "Tuple", "floor", "ceiling", "FloorToInt", "CeilToInt", "RoundToInt"),
        *("TruncToInt", "TruncToFloat", "RoundDecimal", "ToFloat", "IntTrueDiv", "FloatTrueDiv"),
        *("PowByNatural", "FloatPow", "LShift", "RShift", "BitwiseFn_bitwise_and"),
        *("BitwiseFn_bitwise_or", "Identity", "OpaqueUnaryFn_sqrt", "And", "Or", "Not", "Eq", "Ne"),
        *("Equality", "Unequality", "StrictLessThan", "StrictGreaterThan", "LessThan"),
        *("GreaterThan", "Lt", "Le", "Gt", "Ge", "float", "int", "abs", "max", "min"),
        "cast_symbool_to_symint_guardless",
    }
)
_METHODS = frozenset({"size", "stride", "storage_offset", "dim", "item"})
_MATH = frozenset({"ceil", "floor", "trunc", "sqrt"})
# What can stand in generated code, quoted or as a name, and do nothing there.
_TEXT = re.compile(r"[\w .\-/:+]{0,1000}")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w{0,1000}|")
# How the texts of a program are used; those under any other name have to be harmless everywhere.
_EXPRESSIONS = frozenset({"expr_str", "guards_code"})
_FUNCTION_NAMES = frozenset({"target", "as_operator"})
_IDENTIFIERS = frozenset({"name", "as_name", "forward_arg_names"})
_STRUCTURES = frozenset({"in_spec", "out_spec"})
_NOTES = frozenset({"nn_module_stack", "torch_fn", "source_fn_stack"})
# Lines of source code and folders of the machine that exported it: in no file of ours.
PRIVATE_NOTES = ("stack_trace", "from_node", "custom")
_VALUES = frozenset({"as_string", "as_strings"})
_MAX_EXPRESSION = 20_000
_MAX_NUMBER = 2**64
_MAX_EXPONENT = 16
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(\.\w+)?")
_PYTHON_OPERATORS = re.compile(
    r"_operator\.(getitem|add|sub|mul|mod|neg|pos|pow|floordiv|truediv|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|trunc|sqrt)"
    r"|torch\.(sym_\w+|_sym_sqrt)"
)
# Operators that reach beyond tensors: files, scripts, other processes.
_DENIED_NAMESPACES = frozenset({"prim", "profiler", "inductor", "_c10d_functional", "c10d", "rpc"})
_DENIED_OPERATORS = frozenset({"from_file", "_print", "_breakpoint", "save", "load"})


class ProgramError(ValueError):
    """A program contains what no exported program has."""


def check_program(text: bytes) -> None:
    """Check the JSON of an exported program.

    Args:
        text: The content of ``models/model.json``.

    Raises:
        ProgramError: It is no JSON, calls something that is no operator, or has an expression
            that is more than arithmetic on sizes.
    """
    try:
        values = json.loads(text)
        for key, value in _texts(values, ""):
            _check_text(key, value)
    except (RecursionError, MemoryError) as error:
        raise ProgramError("it nests too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ProgramError(f"it is no JSON: {error}") from error


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every text with the key that it stands under; keys, too."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield "", name
            yield from _texts(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)


def _check_text(key: str, text: str) -> None:
    if key in _EXPRESSIONS:
        check_expression(text)
    elif key in _FUNCTION_NAMES:
        check_target(text)
    elif key in _IDENTIFIERS:
        _check_form(key, text, _IDENTIFIER)
    elif key in _STRUCTURES:
        _check_structure(key, text)
    elif key not in _NOTES | _VALUES:
        _check_form(key, text, _TEXT)


def _check_form(key: str, text: str, form: re.Pattern[str]) -> None:
    if not form.fullmatch(text):
        raise ProgramError(f"{key or 'a name'} is {text[:80]!r}, which torch would write into code")


def _check_structure(key: str, text: str) -> None:
    """Check how inputs or results nest: names of types, and JSON within JSON that holds names of values."""
    for name, part in _texts(json.loads(text) if text else None, key):
        if name == "context":
            for _, value in _texts(json.loads(part), name):
                # The context of a defaultdict names a module to import.
                _check_form(
                    "a name of an input or result", value.replace("default_factory", "'"), _TEXT
                )
        else:
            _check_form(key, part, _TEXT)


def check_target(target: str) -> None:
    """Check the name of a function that a graph calls.

    Raises:
        ProgramError: It is no operator.

    Example:
        >>> check_target("torch.ops.aten.linear.default")
        >>> check_target("torch.serialization.os.system")
        Traceback (most recent call last):
        versatil_core.program_check.ProgramError: it calls 'torch.serialization.os.system'...
    """
    operator = _OPERATOR.fullmatch(target)
    if operator is None:
        is_known = _PYTHON_OPERATORS.fullmatch(target) is not None
    else:
        namespace, name, _ = operator.groups()
        is_known = namespace not in _DENIED_NAMESPACES and name not in _DENIED_OPERATORS
    if not is_known:
        raise ProgramError(f"it calls {target[:80]!r}, which is no operator on tensors or sizes")


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
    for node in ast.walk(tree.body):
        if not _is_arithmetic(node):
            raise ProgramError(f"the expression {text[:80]!r} is more than arithmetic on sizes")


def _is_arithmetic(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            return re.fullmatch(r"[A-Za-z]\w{0,50}", name) is not None
        case ast.Constant(value=value):
            return _is_plain(value)
        case ast.BinOp(op=ast.Pow() | ast.LShift(), right=exponent):
            # Else a short text could take for ever.
            return isinstance(exponent, ast.Constant) and exponent.value in range(_MAX_EXPONENT)
        case ast.Call(func=ast.Name(id=name)):
            return name in _FUNCTIONS
        case ast.Attribute(attr=name):
            return name in _METHODS | _MATH
        case _:
            return isinstance(node, _PLAIN_NODES) or _is_method_call(node)


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return _TEXT.fullmatch(value) is not None
    if isinstance(value, int):
        return abs(value) <= _MAX_NUMBER
    return isinstance(value, float)


def _is_method_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


_PLAIN_NODES = (
    *(ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.keyword),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Subscript, ast.Tuple, ast.List),
)
