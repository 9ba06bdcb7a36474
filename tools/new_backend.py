"""Create the package of a new backend: complete, typed, and passing its conformance tests.

    python tools/new_backend.py acme-riscv --machine riscv64 --into ~/src

writes the folder ``~/src/acme-riscv``. Its backend runs each linear and convolution as one product
of int8 matrices, by torch's own kernel: a start that works on every CPU, to replace step by step.
"""

from __future__ import annotations

import argparse
import keyword
import platform
import re
import shlex
import string
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).resolve().parent / "backend_template"
SUFFIX = ".in"
CONSTRAINTS = ROOT / "tools" / "constraints" / "torch-2.13.txt"
# Taken, whatever is installed here: what a backend imports, and is installed with.
# "versatil" belongs to somebody else.
TAKEN_NAMES = {
    *(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")),
    *("versatil", "torch", "torchao", "numpy", "packaging", "psutil", "rich", "typer", "jinja2"),
    *("hatchling", "pip", "pytest", "setuptools"),
    *sys.stdlib_module_names,
}
TAKEN_BACKENDS = {"x86_inductor", "arm_inductor"}


def problems(name: str, machines: list[str], target: Path) -> Iterator[str]:
    """Yield the reasons why no package can be made.

    Args:
        name: The distribution's name, such as ``acme-riscv``.
        machines: Values of ``platform.machine()``, in lower case.
        target: The folder to write.
    """
    import_name = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(name):
        yield f"{name!r} is no name: use lower-case words with hyphens, such as acme-riscv"
        return
    if TAKEN_NAMES & {name, import_name}:
        yield f"the name {name!r} is taken by another package: choose one of your own"
    if import_name in TAKEN_BACKENDS:
        yield f"a backend named {import_name!r} exists: choose another name"
    for machine in machines:
        if not re.fullmatch(r"[a-z0-9_]+", machine):
            yield (
                f"{machine!r} is no machine: use what platform.machine() returns there, in lower "
                f"case, such as riscv64"
            )
    if target.exists():
        yield f"{target} exists: choose another name or folder"
    if not target.parent.is_dir():
        yield f"{target.parent} is no folder: create it first"


def values_for(name: str, machines: list[str]) -> dict[str, str]:
    """Return what stands for each placeholder of the template."""
    # A hardware package of ours asks for what any of them needs.
    x86 = tomllib.loads((ROOT / "packages/versatil-x86/pyproject.toml").read_text("utf-8"))
    parts = (re.split(r"(?=[<>=])", text, maxsplit=1) for text in x86["project"]["dependencies"])
    ranges = {part[0]: part[1] for part in parts}
    words = name.split("-")
    return {
        "distribution": name,
        "import_name": name.replace("-", "_"),
        "class_name": "".join(word.capitalize() for word in words) + "Backend",
        "machines": ", ".join(machines),
        "machine_types": repr(tuple(machines)).replace("'", '"'),
        "core_range": ranges["versatil-core"],
        "passes_range": ranges["versatil-passes"],
        "torch_range": ranges["torch"],
        "torchao_range": ranges["torchao"],
    }


def write_package(target: Path, values: dict[str, str]) -> None:
    """Write the package; its folder appears when it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        folder = Path(unfinished) / target.name
        for source in sorted(TEMPLATE.rglob(f"*{SUFFIX}")):
            relative = source.relative_to(TEMPLATE).as_posix().removesuffix(SUFFIX)
            path = folder / relative.replace("import_name", values["import_name"])
            path.parent.mkdir(parents=True, exist_ok=True)
            text = string.Template(source.read_text(encoding="utf-8")).substitute(values)
            path.write_text(text, encoding="utf-8")
        license_text = (ROOT / "LICENSE").read_text(encoding="utf-8")
        (folder / "LICENSE").write_text(license_text, encoding="utf-8")
        folder.rename(target)


def next_steps(package: Path) -> str:
    """Return the commands that install and test the new package, from any folder."""
    siblings = [ROOT / "packages" / name for name in ("versatil-passes", "versatil-core")]
    commands: list[list[str | Path]] = [
        ["pip", "install", "-c", CONSTRAINTS, *siblings],
        ["pip", "install", "--editable", f"{package}[test]"],
        ["pytest", package],
    ]
    return "\n".join(f"    {shlex.join(map(str, command))}" for command in commands)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and do what it says."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("name", help="the distribution's name, such as acme-riscv")
    parser.add_argument(
        "--machine",
        action="append",
        help="platform.machine() where the kernels exist; may be repeated; this machine if missing",
    )
    parser.add_argument("--into", type=Path, default=Path(), help="where to write; default: here")
    options = parser.parse_args(arguments)
    machines = options.machine or [platform.machine().lower()]
    target = options.into.expanduser().resolve() / options.name
    for problem in problems(options.name, machines, target):
        parser.error(problem)  # ends the program: nothing is written
    write_package(target, values_for(options.name, machines))
    print(target, file=sys.stderr)
    print(f"Next, in an environment of its own:\n{next_steps(target)}", file=sys.stderr)


if __name__ == "__main__":
    main()
