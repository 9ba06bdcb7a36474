"""The public names are those in ``packages/*/public_api.txt``, a file one can diff.

Two states of such a file tell what the newer one breaks; a release reads that.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import new_backend
from public_api import PUBLIC_BELOW, incompatible_changes, parameters, public_values
from release_state import OURS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(OURS)
TOOL = ROOT / "tools" / "public_api.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_api_is_as_written_down(package: str) -> None:
    described = subprocess.run(
        [sys.executable, str(TOOL), package], capture_output=True, text=True, check=True
    ).stdout

    assert described == manifest(package), (
        "run `python tools/public_api.py --write` and review the diff"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist_and_are_documented(package: str) -> None:
    module = importlib.import_module(package.replace("-", "_"))

    assert sorted(module.__all__) == sorted(set(module.__all__))
    for name, value in public_values(module.__name__, PUBLIC_BELOW.get(package, ())).items():
        assert name == "__version__" or value.__doc__, f"{name} has no docstring"


def listed(package: str) -> set[str]:
    """Return the names in a package's description."""
    return set(re.findall(r"^(?:class )?(\w[\w.]*)", manifest(package), re.MULTILINE))


def test_names_below_the_top_are_described() -> None:
    testing = importlib.import_module("versatil_core.testing")

    assert {f"testing.{name}" for name in testing.__all__} <= listed("versatil-core")
    assert "    testing.BackendConformance.make_backend(self, options=None)\n" in manifest(
        "versatil-core"
    )
    assert ".test_" not in manifest("versatil-core"), "a test is run, not called"


def test_a_new_backend_imports_public_names_only(tmp_path: Path) -> None:
    new_backend.main(["acme-riscv", "--machine", "riscv64", "--into", str(tmp_path)])
    imported = set()
    for file in tmp_path.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Import) and node.names[0].name.startswith("versatil"))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("versatil_"):
                module, _, below = (node.module or "").partition(".")
                prefix = f"{below}." if below else ""
                imported |= {(module.replace("_", "-"), prefix + it.name) for it in node.names}

    assert ("versatil-core", "testing.BackendConformance") in imported
    assert [name for package, name in sorted(imported) if name not in listed(package)] == []


def test_a_function_as_default_is_shown_without_its_address() -> None:
    def f(key: object = lambda _: True, *, other: object = len) -> None: ...

    assert parameters(f) == "(key=<function>, *, other=<built-in function len>)"
    assert incompatible_changes(f"f{parameters(f)}", "f(key=1, *, other=2)") == []


def manifest(package: str) -> str:
    """Return the description of a package as it is written down."""
    return (ROOT / "packages" / package / "public_api.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("f()\ng()", "g()", "f was removed"),
        ("f()", "class f", "f was a function and is a class"),
        ("class A\n    A.x", "class A\n    A.x(self)", "A.x was a value and is a function"),
        ("class A\n    A.x", "class A", "A.x was removed"),
        ("class A(B, C)", "class A(B)", "A is no C any more"),
        ("class A(B)", "class A", "A is no B any more"),
        ("f(a, b)", "f(a)", "f: b was removed"),
        ("f(a)", "f(b)", "f: a was removed"),
        ("f(a, b)", "f(b, a)", "f: a is at another position"),
        ("f(a, c=1)", "f(a, b=1, c=1)", "f: c is at another position"),
        ("f(a)", "f(a, b)", "f: b has to be given now"),
        ("f(a)", "f(a, *, b)", "f: b has to be given now"),
        ("f(*c)", "f(*a, c)", "f: c has to be given now"),
        ("f(**c)", "f(c, **a)", "f: c has to be given now"),
        ("f(a=<factory>)", "f(a)", "f: a has to be given now"),
        ("f(a)", "f(*, a)", "f: a can't be given by position any more"),
        ("f(a)", "f(a, /)", "f: a can't be given by name any more"),
        ("f(*a)", "f(a, b)", "f: it takes fewer positional arguments than any number"),
        ("f(*a)", "f(b=1, *a)", "f: it takes fewer positional arguments than any number"),
        ("f(**a)", "f(a=1)", "f: it takes fewer names than any"),
        ("f(a, /, **b)", "f(a, **b)", "f: it takes fewer names than any"),
        (
            "class A(B)",
            "class A(B)\n    A(*, x=1, **y)",
            "A: it takes fewer positional arguments than any number",
        ),
        ("class A\n    A(x)", "class A\n    A(x, y)", "A: y has to be given now"),
        ("class A", "class A\n    A(x)", "A: x has to be given now"),
        ("class A\n    A.f(self)", "class A\n    A.f(self, x)", "A.f: x has to be given now"),
    ],
)
def test_what_breaks_users_is_named(old: str, new: str, change: str) -> None:
    assert change in incompatible_changes(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("f()", "f()\ng(x)\nclass A(B)\n    A(y)\n    A.z"),
        ("f(a)", "f(a, b=1, *rest, c=<factory>, **more)"),
        ("f(a, *, b)", "f(a, b)"),
        ("f(a, *, b)", "f(a, *, b=[1, 2])"),
        ("f(a=(torch.uint8,))", "f(a='<other>')"),
        ("class A(B)", "class A(B, C)"),
        ("class A", "class A\n    A(x=1)\n    A.y(self)"),
        ("class A\n    A(x)\n    A.y", "class A\n    A.y\n    A(x, z=None)"),
    ],
)
def test_what_breaks_nobody_is_no_change(old: str, new: str) -> None:
    assert incompatible_changes(old, new) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_line_can_be_taken_away_unnoticed(package: str) -> None:
    """On the real files: each line is read, and missing, it is an incompatible change."""
    lines = manifest(package).splitlines()

    assert incompatible_changes(manifest(package), manifest(package)) == []
    for number, line in enumerate(lines):
        less = "\n".join(lines[:number] + lines[number + 1 :])
        assert incompatible_changes(manifest(package), less), line


def parameter(name: str) -> st.SearchStrategy[inspect.Parameter]:
    """Return any parameter of that name."""
    kinds = st.sampled_from(list(inspect._ParameterKind))
    return st.builds(
        lambda kind, default: inspect.Parameter(
            name, kind, default=inspect.Parameter.empty if kind.name.startswith("VAR") else default
        ),
        kinds,
        st.sampled_from([1, inspect.Parameter.empty]),
    )


def made_of(parameters: list[inspect.Parameter]) -> inspect.Signature:
    """Return a signature that Python takes: kinds in order, one of each variable kind."""
    found: list[inspect.Parameter] = []
    is_optional = False
    for given_one in sorted(parameters, key=lambda parameter: parameter.kind):
        if given_one.kind.name.startswith("VAR") and given_one.kind in {it.kind for it in found}:
            continue
        is_optional |= given_one.default == 1
        by_place = given_one.kind.name.startswith("POSITIONAL")
        found.append(given_one.replace(default=1) if is_optional and by_place else given_one)
    return inspect.Signature(found)


@st.composite
def edited(draw: st.DrawFn, old: inspect.Signature) -> inspect.Signature:
    """Draw a later state: a few parameters are lost, changed, moved or added."""
    parameters = list(old.parameters.values())
    for name in draw(st.lists(st.sampled_from("abcxyz"), max_size=2, unique=True)):
        parameters = [it for it in parameters if it.name != name]
        place = draw(st.integers(0, len(parameters)))
        parameters[place:place] = draw(st.lists(parameter(name), max_size=1))
    return made_of(parameters)


signatures = st.lists(st.sampled_from("abcde"), max_size=4, unique=True).flatmap(
    lambda names: st.tuples(*map(parameter, names)).map(lambda found: made_of(list(found)))
)


@settings(max_examples=300, deadline=None)
@given(
    states=signatures.flatmap(lambda old: st.tuples(st.just(old), edited(old))),
    positional=st.integers(0, 4),
    names=st.sets(st.sampled_from("abcdexyz"), max_size=3),
)
def test_whatever_could_be_called_still_can(
    states: tuple[inspect.Signature, inspect.Signature], positional: int, names: set[str]
) -> None:
    """Python itself says which calls a signature takes."""
    old, new = states
    if incompatible_changes(f"f{old}", f"f{new}"):
        return
    try:
        old.bind(*[0] * positional, **dict.fromkeys(names, 0))
    except TypeError:
        return  # the old one did not take this call

    new.bind(*[0] * positional, **dict.fromkeys(names, 0))


@settings(deadline=None)
@given(old=signatures, data=st.data())
def test_a_parameter_that_is_lost_is_noticed(old: inspect.Signature, data: st.DataObject) -> None:
    assume(old.parameters)
    lost = data.draw(st.sampled_from(sorted(old.parameters)))
    rest = [found for name, found in old.parameters.items() if name != lost]

    assert incompatible_changes(f"f{old}", f"f{old.replace(parameters=rest)}")


@settings(deadline=None)
@given(old=signatures)
def test_an_optional_parameter_at_the_end_breaks_nothing(old: inspect.Signature) -> None:
    assume(not any(found.kind.name.startswith("VAR") for found in old.parameters.values()))
    more = inspect.Parameter("z", inspect.Parameter.KEYWORD_ONLY, default=1)

    new = old.replace(parameters=[*old.parameters.values(), more])

    assert incompatible_changes(f"f{old}", f"f{new}") == []
