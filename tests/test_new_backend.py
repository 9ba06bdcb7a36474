"""A package that tools/new_backend.py creates is complete: it builds, and keeps the contract at once."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import new_backend
from wheels import build_package

ROOT = Path(__file__).resolve().parent.parent
# In tox they are there, or it is a failure.
needs_checkers = pytest.mark.skipif(
    find_spec("mypy") is None and "TOX_ENV_NAME" not in os.environ,
    reason="mypy and ruff are not installed: `tox run -e integration` has them",
)


def create(into: Path, name: str = "acme-int8", *machines: str) -> Path:
    options = [part for machine in machines for part in ("--machine", machine)]
    new_backend.main([name, "--into", str(into), *options])
    return into / name


def install(package: Path, builder: Path) -> Path:
    """Build the package, and unpack its wheel apart from this environment."""
    built = build_package(package, package / "dist", builder)
    [wheel] = [path for path in built if path.suffix == ".whl"]
    site = package / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*command, site, wheel], check=True)
    return site


def run_tests(package: Path, site: Path, *options: str) -> dict[str, int]:
    """Run the package's own tests in a new interpreter; return how many ended how."""
    report = package / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *options],
        cwd=package,
        env=os.environ | {"PYTHONPATH": str(site)},
        check=False,
    )
    [suite] = ET.parse(report).getroot().iter("testsuite")  # noqa: S314 -- our own report
    return {name: int(suite.get(name, -1)) for name in ("tests", "failures", "errors", "skipped")}


def test_its_tests_pass_and_run_int8_kernels(tmp_path: Path, builder: Path) -> None:
    package = create(tmp_path)

    found = run_tests(package, install(package, builder))

    assert found.pop("tests") > 40
    assert found == {"failures": 0, "errors": 0, "skipped": 0}


def test_for_another_machine_only_the_kernels_are_skipped(tmp_path: Path, builder: Path) -> None:
    package = create(tmp_path, "acme-riscv", "riscv64")

    found = run_tests(
        package, install(package, builder), "-k", "exact or int8 or rules_are or compil"
    )

    # judge: options x models; compilation: tests x options; torch.compile
    kernel_tests = 2 * 6 + 3 * 2 + 1
    assert found == {"tests": kernel_tests + 3, "failures": 0, "errors": 0, "skipped": kernel_tests}


def test_it_is_complete(tmp_path: Path) -> None:
    package = create(tmp_path, "acme-riscv", "riscv64", "riscv32")
    core = tomllib.loads((ROOT / "packages/versatil-core/pyproject.toml").read_text("utf-8"))
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    files = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    modules = ("__about__", "__init__", "backend", "dynamo", "quantizer", "rules", "settings")
    assert files == {
        *(".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"),
        *("tests/test_backend.py", "tests/test_conformance.py", "src/acme_riscv/py.typed"),
        *(f"src/acme_riscv/{module}.py" for module in modules),
    }
    assert {text for text in core["project"]["dependencies"] if text.startswith("torch")} < {
        *project["dependencies"]
    }
    assert project["entry-points"] == {
        "versatil.backends": {"acme_riscv": "acme_riscv:AcmeRiscvBackend"},
        "torch_dynamo_backends": {"acme_riscv": "acme_riscv.dynamo:acme_riscv"},
    }
    rules = (package / "src/acme_riscv/rules.py").read_text(encoding="utf-8")
    assert 'MACHINE_TYPES = ("riscv64", "riscv32")' in rules
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@needs_checkers
@pytest.mark.parametrize("machines", [["riscv64"], ["riscv64", "riscv32"]])
@pytest.mark.parametrize("name", ["a", "acme-riscv", "acme-vector-extensions-for-everyone"])
def test_ruff_finds_nothing(tmp_path: Path, name: str, machines: list[str]) -> None:
    package = create(tmp_path, name, *machines)

    for action in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *action, "--no-cache", "."]
        result = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


@needs_checkers
def test_mypy_finds_nothing(tmp_path: Path) -> None:
    package = create(tmp_path)

    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache"],
        cwd=package,
        env=os.environ | {"MYPYPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Acme"], "'Acme' is no name: use lower-case words with hyphens"),
        (["acme_int8"], "is no name"),
        (["../acme"], "is no name"),
        (["4bit"], "is no name"),
        (["class"], "is no name"),
        (["versatil"], "taken by another package"),
        (["versatil-x86"], "taken by another package"),
        (["torch"], "taken by another package"),
        (["torchao"], "taken by another package"),
        (["numpy"], "taken by another package"),
        (["json"], "taken by another package"),
        (["x86-inductor"], "a backend named 'x86_inductor' exists"),
        (["acme", "--machine", "RISC-V"], "'RISC-V' is no machine"),
        (["acme", "--machine", "riscv64", "--machine", ""], "'' is no machine"),
        (["taken"], "exists: choose another"),
        (["acme", "--into", "nowhere"], "is no folder: create it first"),
    ],
)
def test_refused_before_anything_is_written(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()

    with pytest.raises(SystemExit) as error:
        new_backend.main(arguments)

    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]


def test_a_plain_python_refuses_the_same(tmp_path: Path) -> None:
    """The names that are taken don't depend on what is installed where the script runs."""
    script = [sys.executable, "-I", "-S", new_backend.__file__]

    found = {
        name: subprocess.run(
            [*script, name, "--into", tmp_path], capture_output=True, check=False
        ).returncode
        for name in ("torch", "torchao", "release", "wheels")
    }

    assert found == {"torch": 2, "torchao": 2, "release": 0, "wheels": 0}
    assert {path.name for path in tmp_path.iterdir()} == {"release", "wheels"}


def test_its_hint_installs_the_siblings_from_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my packages"
    folder.mkdir()
    package = create(folder)

    first, second, third = (
        shlex.split(line) for line in capsys.readouterr().err.splitlines() if line.startswith(" ")
    )
    assert first[:3] == ["pip", "install", "-c"]
    assert Path(first[3]).is_file()
    assert [
        tomllib.loads((Path(path) / "pyproject.toml").read_text("utf-8"))["project"]["name"]
        for path in first[4:]
    ] == ["versatil-passes", "versatil-core"]
    assert second == ["pip", "install", "--editable", f"{package}[test]"]
    assert third == ["pytest", str(package)]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_backend, "values_for", lambda *_: {"import_name": "acme"})

    with pytest.raises(KeyError):
        new_backend.main(["acme", "--into", str(tmp_path)])

    assert not [*tmp_path.iterdir()]
