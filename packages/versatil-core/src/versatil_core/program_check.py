"""What the text of an exported program may contain, so that loading it runs nothing but operators.

A program names functions by dotted paths below ``torch``, holds sizes and guards as expressions that torch evaluates
as Python, and its names become those of generated Python. A file from elsewhere could name
``torch.serialization.os.system`` there, or an input ``x=exit()``.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import torch

from versatil_core.size_expressions import IDENTIFIER, TEXT, ProgramError, check_expression

# How the texts of a program are used; those under any other name have to be harmless everywhere.
_EXPRESSIONS = frozenset({"expr_str", "guards_code"})
_FUNCTION_NAMES = frozenset({"target", "as_operator"})
_IDENTIFIERS = frozenset({"name", "as_name", "forward_arg_names"})
_STRUCTURES = frozenset({"in_spec", "out_spec"})
_NOTES = frozenset({"nn_module_stack", "torch_fn", "source_fn_stack"})
# Lines of source code and folders of the machine that exported it: in no file of ours.
PRIVATE_NOTES = ("stack_trace", "from_node", "custom")
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?")
_PYTHON_OPERATORS = re.compile(
    r"_operator\.(getitem|add|sub|mul|mod|neg|pos|pow|floordiv|truediv|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|trunc|sqrt)"
    r"|torch\.(sym_\w+|_sym_sqrt)"
)
# Operators that reach beyond tensors: files, scripts, other processes.
_DENIED_NAMESPACES = frozenset({"prim", "profiler", "inductor", "_c10d_functional", "c10d", "rpc"})
_DENIED_OPERATORS = frozenset(
    # The last ones take sizes and strides on trust.
    {"from_file", "_print", "_breakpoint", "save", "load", "_reshape_alias", "set_", "resize_"}
)
# Operators that run other graphs; the rest of them can run any function.
_GRAPH_RUNNERS = frozenset(
    {"cond", "map_impl", "while_loop", "scan", "wrap_with_set_grad_enabled", "wrap_with_autocast"}
)


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
            # The limits of a size stand under the size itself.
            yield ("expr_str" if key == "range_constraints" else ""), name
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
        _check_form(key, text, IDENTIFIER)
    elif key in _STRUCTURES:
        _check_structure(key, text)
    elif key not in _NOTES:
        _check_form(key, text, TEXT)


def _check_form(key: str, text: str, form: re.Pattern[str]) -> None:
    if not form.fullmatch(text):
        raise ProgramError(
            f"{key or 'a name'} is {text[:80]!r}, which torch would write into code: rename it in the model"
        )


def _check_structure(key: str, text: str) -> None:
    """Check how inputs or results nest, which is JSON in a text, with more JSON in texts."""
    structure = json.loads(text) if text else None
    if key == "in_spec" and structure:
        for name in _keywords(structure):
            _check_form("an input", str(name), IDENTIFIER)
    for name, context in _contexts(structure):
        _check_form(key, name, TEXT)
        keys = json.loads(context) if isinstance(context, str) else context
        for value in keys if isinstance(keys, list) else [keys]:
            # Enumerations and defaultdicts name a module here, which torch would import.
            if isinstance(value, dict | list):
                raise ProgramError(
                    f"{key} has a {name or 'value'} of {str(value)[:80]!r}, no plain key"
                )
            _check_form(key, str(value), TEXT)


def _keywords(structure: Any) -> list[Any]:
    """Return the names of inputs: the second of two containers, the first of which has no names."""
    try:
        by_name = structure[1]["children_spec"][1]["context"]
        return list(json.loads(by_name))
    except (IndexError, KeyError, TypeError):
        raise ProgramError("it does not say how its inputs nest") from None


def _contexts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the type of each container, with what tells two of the type apart."""
    if isinstance(value, dict):
        yield str(value.get("type")), value.get("context")
        yield from _contexts(value.get("children_spec"))
    elif isinstance(value, list):
        for item in value:
            yield from _contexts(item)


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
        is_known = _is_operator(*operator.groups())
    if not is_known:
        raise ProgramError(
            f"it calls {target[:80]!r}, which is no operator on tensors or sizes; if it is one of a "
            f"library, import that library first"
        )


def _is_operator(namespace: str, name: str, overload: str | None) -> bool:
    if namespace in _DENIED_NAMESPACES or name in _DENIED_OPERATORS:
        return False
    if namespace == "higher_order":
        return name in _GRAPH_RUNNERS
    found: Any = torch.ops
    for part in (namespace, name, overload or "default"):
        found = getattr(found, part, None)
    return isinstance(found, torch._ops.OpOverload)
