"""The command from the outside: its results, its exit codes, its files."""

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from versatil_core import BasePT2EBackend, command_quantize, discovery, load
from versatil_core.command import _backend_options, app
from versatil_core.discovery import BackendEntry
from versatil_core.errors import BackendNotFoundError

FACTORIES = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.table = torch.nn.Embedding(4, 16)
    def forward(self, x):
        return self.head(torch.relu(self.body(x)) + self.table.weight.sum(0))
class WithConv(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(1, 2, 3), torch.nn.Linear(2, 2)
    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))
def model(): return Net()
def with_example(): return Net(), torch.ones(2, 8)
def complete(): return Net(), torch.ones(2, 8), [torch.randn(2, 8) for _ in range(3)]
def outliers():
    torch.manual_seed(0)
    batches = [torch.randn(16, 8) * torch.tensor([50.0] + 7 * [1.0]) for _ in range(4)]
    return Net(), batches[0], batches
def with_conv(): return WithConv(), torch.ones(2, 1, 5, 5), [torch.randn(2, 1, 5, 5)]
def broken(): raise OSError("weights are gone")
"""
unique = itertools.count()


@pytest.fixture
def module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linear_backend: type[BasePT2EBackend]
) -> Iterator[str]:
    """Name of a module with factories in the working directory; one backend is installed."""
    name = f"models_{next(unique)}"
    (tmp_path / f"{name}.py").write_text(FACTORIES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def create(backend: str, options: dict[str, object]) -> BasePT2EBackend:
        assert backend == "test_linear"
        return linear_backend(**options)

    monkeypatch.setattr(discovery, "_only_usable", lambda: linear_backend)
    monkeypatch.setattr(command_quantize, "create_backend", create)
    yield name
    sys.modules.pop(name, None)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_quantize_writes_a_file_that_loads(module: str, tmp_path: Path) -> None:
    result = run("quantize", f"{module}:complete", "-o", "out.pt2")
    assert result.exit_code == 0, result.stderr
    assert "2 of 2 layers int8" in result.stdout
    assert result.stdout.endswith("Written to out.pt2\n")
    assert "calibrate and quantize: " in result.stderr
    assert load(tmp_path / "out.pt2")(torch.ones(2, 8)).shape == (2, 4)
    assert [path.name for path in tmp_path.glob("*out*")] == ["out.pt2"]


def test_inspect_says_what_was_equalized(module: str) -> None:
    arguments = ("quantize", f"{module}:outliers", "-o", "out.pt2")
    assert run(*arguments).exit_code == 0
    assert "equalized" not in run("inspect", "out.pt2").stdout
    assert run(*arguments, "--equalize").exit_code == 0

    result = run("inspect", "out.pt2")
    values = json.loads(run("inspect", "out.pt2", "--json").stdout)

    assert "of 2 groups of linear layers that read one tensor" in result.stdout
    text = " ".join(result.stdout.split())
    assert re.search(r"body( and 1 more)?: by a multiply, alpha .* dB less", text), text
    assert [group["layers"] for group in values["manifest"]["info"]["equalized"]] == [
        ["body"],
        ["head"],
    ]


def test_quantize_json_is_all_of_stdout(module: str) -> None:
    result = run("quantize", f"{module}:complete", "-o", "out.pt2", "--json")
    shown = json.loads(result.stdout)
    assert shown["output"] == "out.pt2"
    assert shown["int8_count"] == shown["layer_count"] == 2


def test_dynamic_needs_no_calibration(module: str, tmp_path: Path) -> None:
    assert run("quantize", f"{module}:with_example", "-o", "static.pt2").exit_code == 1
    result = run("quantize", f"{module}:with_example", "-o", "out.pt2", "--dynamic")
    assert result.exit_code == 0, result.stderr
    reference = load(tmp_path / "out.pt2")
    assert reference.meta["versatil"].targets[0].options["is_dynamic"] is True


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ((), {"is_dynamic": False, "quant_max": 127}),
        (("quant_max=255",), {"is_dynamic": False, "quant_max": 255}),
        (("quant_max=255", "is_dynamic=true"), {"is_dynamic": True, "quant_max": 255}),
        (("quant_max=255", "quant_max=63"), {"is_dynamic": False, "quant_max": 63}),
    ],
)
def test_options_of_the_backend(
    module: str, tmp_path: Path, settings: tuple[str, ...], options: dict[str, object]
) -> None:
    arguments = [argument for setting in settings for argument in ("--option", setting)]
    result = run("quantize", f"{module}:complete", "-o", "out.pt2", *arguments)
    assert result.exit_code == 0, result.stderr
    [target] = load(tmp_path / "out.pt2").meta["versatil"].targets
    assert target.options == {"is_qat": False, **options}


@pytest.mark.parametrize(
    ("arguments", "int8"),
    [
        (("--target", "body"), 1),
        (("--exclude", "head"), 1),
        (("--target", "body", "--target", "head=dynamic"), 2),
        (("--operator", "linear"), 2),
        (("--target", "*", "--exclude", "head", "--dynamic"), 1),
    ],
)
def test_targets(module: str, tmp_path: Path, arguments: tuple[str, ...], int8: int) -> None:
    result = run("quantize", f"{module}:complete", "-o", "out.pt2", *arguments)
    assert result.exit_code == 0, result.stderr
    assert f"{int8} of 2 layers int8" in result.stdout
    targets = load(tmp_path / "out.pt2").meta["versatil"].targets
    dynamic = [target.module_path for target in targets if target.options["is_dynamic"]]
    assert dynamic == {"head=dynamic": ["head"], "--dynamic": ["*"]}.get(arguments[-1], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "bdy"), "did you mean 'body'"),
        (("--exclude", "hed"), "did you mean 'head'"),
        (("--target", "body=fast"), "write body=static or body=dynamic"),
        (("--target", "body", "--target", "body=dynamic"), "overlap"),
        (("--operator", "liner"), "did you mean 'linear'"),
    ],
)
def test_a_wrong_target_fails(module: str, arguments: tuple[str, ...], message: str) -> None:
    result = run("quantize", f"{module}:complete", "-o", "out.pt2", *arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert not Path("out.pt2").exists()


def test_an_option_goes_with_dynamic(module: str, tmp_path: Path) -> None:
    arguments = ("--dynamic", "--option", "quant_max=255")
    result = run("quantize", f"{module}:with_example", "-o", "out.pt2", *arguments)
    assert result.exit_code == 0, result.stderr
    [target] = load(tmp_path / "out.pt2").meta["versatil"].targets
    assert target.options == {"is_qat": False, "is_dynamic": True, "quant_max": 255}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("null", None),
        ('"1"', "1"),
        ("reduce_range", "reduce_range"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_an_options_value_is_json_or_a_text(text: str, value: object) -> None:
    assert _backend_options([f"name={text}"], is_dynamic=False) == {"name": value}


@pytest.mark.parametrize("setting", ["quant_max", "=255", ""])
def test_a_malformed_option_is_wrong_usage(module: str, tmp_path: Path, setting: str) -> None:
    result = run("quantize", f"{module}:complete", "-o", "out.pt2", "--option", setting)
    assert result.exit_code == 2
    assert f"{setting!r} is not NAME=VALUE" in result.stderr
    assert not list(tmp_path.glob("*.pt2"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "colour=red",
            "colour='red' is not possible: the options are is_dynamic, is_qat, quant_max",
        ),
        ("is_dynamic=False", "is_dynamic='False' is not possible: it is true or false"),
    ],
)
def test_an_option_that_the_backend_refuses(
    module: str, tmp_path: Path, setting: str, message: str
) -> None:
    result = run("quantize", f"{module}:complete", "-o", "out.pt2", "--option", setting)
    assert result.exit_code == 1
    assert result.stderr == f"error: backend 'test_linear': {message}\n"
    assert not list(tmp_path.glob("*.pt2"))


def test_an_option_that_contradicts_dynamic(module: str, tmp_path: Path) -> None:
    arguments = ("--dynamic", "--option", "is_dynamic=false")
    result = run("quantize", f"{module}:complete", "-o", "out.pt2", *arguments)
    assert result.exit_code == 2
    assert "contradicts --dynamic" in result.stderr
    assert not list(tmp_path.glob("*.pt2"))


def test_calibration_file_goes_before_the_factorys(module: str, tmp_path: Path) -> None:
    torch.save([torch.randn(2, 8) for _ in range(5)], tmp_path / "batches.pt")
    arguments = ("quantize", f"{module}:complete", "-o", "out.pt2")
    assert run(*arguments, "--calibration", "batches.pt").exit_code == 0
    assert load(tmp_path / "out.pt2").meta["versatil"].calibration_batches == 5


def test_first_calibration_batch_is_the_example_if_there_is_none(module: str) -> None:
    torch.save([torch.randn(2, 8)], "batches.pt")
    arguments = ("quantize", f"{module}:model", "-o", "out.pt2")
    assert run(*arguments, "--calibration", "batches.pt").exit_code == 0
    result = run(*arguments, "--dynamic")
    assert result.exit_code == 1
    assert "there are no example inputs" in result.stderr


def test_exported_program_with_npz_stays_dynamic(module: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 4))
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(net, (torch.ones(2, 8),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "float.pt2")
    np.savez(tmp_path / "batches.npz", np.random.default_rng(0).random((9, 8), np.float32))
    result = run("quantize", "float.pt2", "-o", "out.pt2", "--calibration", "batches.npz")
    assert result.exit_code == 0, result.stderr
    assert module
    reference = load(tmp_path / "out.pt2")
    assert reference(torch.ones(7, 8)).shape == (7, 4)
    assert reference.meta["versatil"].calibration_batches == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{module}:broken", "the factory failed (OSError: weights are gone)"),
        ("{module}:nothing", "has no 'nothing'"),
        ("missing.pt2", "no such model file"),
        ("garbage.pt2", "not a program"),
        ("{module}:with_example", "calibration"),
    ],
)
def test_a_failed_quantize_leaves_the_old_file(
    module: str, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "garbage.pt2").write_bytes(b"not a model")
    (tmp_path / "out.pt2").write_bytes(b"old")
    result = run("quantize", source.format(module=module), "-o", "out.pt2")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr
    assert (tmp_path / "out.pt2").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.glob("*.pt2*")) == ["garbage.pt2", "out.pt2"]


def test_a_quantized_model_is_not_quantized_again(module: str) -> None:
    assert run("quantize", f"{module}:complete", "-o", "once.pt2").exit_code == 0
    result = run("quantize", "once.pt2", "-o", "twice.pt2")
    assert result.exit_code == 1
    assert "once.pt2: is quantized already" in result.stderr


def test_output_folder_must_exist(module: str) -> None:
    result = run("quantize", f"{module}:complete", "-o", "gone/out.pt2")
    assert result.exit_code == 2
    assert "no such folder: gone" in result.stderr


def test_inspect_shows_the_audit(module: str) -> None:
    assert run("quantize", f"{module}:with_conv", "-o", "out.pt2").exit_code == 0
    result = run("inspect", "out.pt2")
    assert result.exit_code == 0, result.stderr
    assert "1 of 2 layers int8" in result.stdout
    assert result.stderr == ""
    shown = json.loads(run("inspect", "out.pt2", "--json").stdout)
    assert {layer["module_path"]: layer["is_int8"] for layer in shown["layers"]} == {
        "conv": False,
        "head": True,
    }


def test_require_int8(module: str) -> None:
    run("quantize", f"{module}:with_conv", "-o", "out.pt2")
    refused = run("inspect", "out.pt2", "--require-int8")
    assert refused.exit_code == 1
    assert refused.stderr == ("error: 1 of 2 layers stay float without being excluded: conv\n")
    assert "1 of 2 layers int8" in refused.stdout  # the table is there all the same
    assert run("inspect", "out.pt2", "--require-int8", "--exclude", "conv").exit_code == 0
    typo = run("inspect", "out.pt2", "--require-int8", "--exclude", "cnov")
    assert typo.exit_code == 1
    assert "did you mean 'conv" in typo.stderr


def test_inspect_of_no_file(module: str) -> None:
    result = run("inspect", f"{module}.pt2")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""


def test_verbose_shows_the_traceback(module: str) -> None:
    result = run("inspect", f"{module}.pt2", "-v")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


def entries(*names: str) -> tuple[BackendEntry, ...]:
    return tuple(
        BackendEntry(name, f"{name}-package", "1.2", "module_that_is_not_there:Class", None)  # type: ignore[arg-type]
        for name in names
    )


def test_backends_are_listed_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "installed_backends", lambda: entries("a", "b"))
    assert [entry["name"] for entry in json.loads(run("backends", "--json").stdout)] == ["a", "b"]
    table = run("backends").stdout
    assert "a-package" in table
    assert "module_that_is_not_there" in table


def test_no_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "installed_backends", entries)
    result = run("backends")
    assert result.exit_code == 0
    assert "pip install versatil-x86" in result.stdout
    assert json.loads(run("backends", "--json").stdout) == []


def test_doctor_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from versatil_core import doctor

    def no_backend() -> None:
        raise BackendNotFoundError("no backend here", name=None, installed=())

    monkeypatch.setattr(doctor, "installed_backends", entries)
    monkeypatch.setattr(doctor, "host_backend", no_backend)
    result = run("doctor")
    assert result.exit_code == 0
    assert "problem: no backend here" in result.stdout
    assert json.loads(run("doctor", "--json").stdout)["int8"] is None


def test_demo_without_its_extra_says_what_to_install(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    result = run("demo")
    assert module
    assert result.exit_code == 1
    assert 'pip install "versatil-core[demo]"' in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [("demo", "--model", "resnet"), ("quantize", "m:f"), ("nothing",), ("inspect",)],
)
def test_wrong_usage_is_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["", "demo", "doctor", "backends", "quantize", "inspect"])
def test_help(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_version() -> None:
    assert run("--version").stdout.startswith("versatil-core ")
