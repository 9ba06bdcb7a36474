"""``versatil report``, ``bench`` and ``compare``: what they are given, say and write."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from versatil_core import (
    BasePT2EBackend,
    command_measure,
    quantize,
    report_stages,
    save,
)
from versatil_core.command import app

FACTORY = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()

def batches():
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]

def alone():
    return model(), batches()[0]

def calibrated():
    return model(), batches()[0], batches()

def other():
    return nn.Linear(8, 5), torch.zeros(4, 8)

def top1(model):
    return float((model(torch.ones(4, 8)) * 0).sum()) + 0.5

def broken(model):
    raise RuntimeError("no labels")

NUMBER = 3
"""
ACCURACY_ONLY = ("compare", "report_models:calibrated", "model.pt2")


@pytest.fixture(autouse=True)
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linear_backend: Callable[..., BasePT2EBackend]
) -> Path:
    """A folder with a factory, a quantized model and data; the backend is the test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "report_models", raising=False)
    Path("report_models.py").write_text(FACTORY, encoding="utf-8")
    names: dict[str, Any] = {}
    exec(FACTORY, names)  # noqa: S102 -- the text above
    model, example, batches = names["calibrated"]()
    save(quantize(model, example, linear_backend(), batches), "model.pt2")
    np.savez("data.npz", x=torch.cat(names["batches"]()).numpy())
    monkeypatch.setattr(command_measure, "backend_of", lambda _: linear_backend())
    return tmp_path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_compare() -> None:
    result = run(*ACCURACY_ONLY, "--data", "data.npz", "--metric", "report_models:top1")

    assert result.exit_code == 0, result.stderr
    assert "2 of 2 layers int8" in result.stdout
    assert "top1" in result.stdout
    assert "find the error of each layer: " in result.stderr
    assert "Traceback" not in result.output


def test_json_is_all_of_stdout() -> None:
    result = run(*ACCURACY_ONLY, "--json")

    values = json.loads(result.stdout)
    assert values["title"] == "model.pt2"
    assert values["accuracy"]["batches"] == 3
    assert values["speed"] == []
    # The factory's own calibration data flatter a model.
    assert any("not calibrated with" in note for note in values["notes"])
    assert values["environment"]["command"].startswith("versatil")


def test_data_from_a_file_are_not_called_seen() -> None:
    values = json.loads(run(*ACCURACY_ONLY, "--json", "--data", "data.npz").stdout)
    assert not any("not calibrated with" in note for note in values["notes"])


def test_files_are_written() -> None:
    result = run(*ACCURACY_ONLY, "-o", "out.json", "-o", "out.html")

    assert result.exit_code == 0, result.stderr
    assert json.loads(Path("out.json").read_text(encoding="utf-8"))["is_partial"] is False
    assert "<html" in Path("out.html").read_text(encoding="utf-8")
    assert "Written to out.json\nWritten to out.html\n" in result.stdout


def test_bench() -> None:
    result = run(
        "bench", "model.pt2", "--float", "report_models:alone", "--threads", "1", "--rounds", "6"
    )

    assert result.exit_code == 0, result.stderr
    assert "measure with 1 thread, batch 4: " in result.stderr
    assert "float torch.compile on this CPU (1 thread, batch 4)" in " ".join(result.stdout.split())


def asked_for(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """What measure_report() is asked for by a command line."""
    asked: list[Any] = []

    def measured(*values: Any) -> None:
        asked.append(values)
        raise RuntimeError("enough")

    monkeypatch.setattr(command_measure, "measure_report", measured)
    result = run(*arguments)
    assert str(result.exception) == "enough", result.output
    return asked[0]


def test_bench_options(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "bench model.pt2 --float report_models:alone --threads 1,2 --batch 4,8 --rounds 9"
    _, _, _, data, request, _ = asked_for(monkeypatch, *command.split())

    assert (request.threads, request.batch_sizes, request.rounds) == ((1, 2), (4, 8), 9)
    assert request.parts == {"speed"}
    assert [tuple(x.shape for x in batch) for batch in data] == [((4, 8),)]


def test_report_asks_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "report model.pt2 --float report_models:calibrated --data data.npz"
    _, _, _, data, request, _ = asked_for(monkeypatch, *command.split())

    assert request.parts == {"kernels", "accuracy", "speed"}
    assert len(data) == 3


def test_another_backend(monkeypatch: pytest.MonkeyPatch, linear_backend: Any) -> None:
    monkeypatch.setattr(command_measure, "host_backend", lambda _: linear_backend(quant_max=9))
    _, _, backend, *_ = asked_for(monkeypatch, *ACCURACY_ONLY, "--backend", "auto")

    assert backend.quant_max == 9


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--min-sqnr", "10"), 0, ""),
        (("--min-sqnr", "99"), 1, "error: SQNR of at least 99 dB wanted: "),
    ],
)
def test_gates(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run(*ACCURACY_ONLY, "-o", "out.json", *arguments)

    assert result.exit_code == code
    assert message in result.stderr
    # The report is there all the same, and says the same.
    [gate] = json.loads(Path("out.json").read_text(encoding="utf-8"))["gates"]
    assert gate["is_passed"] == (code == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "report_models:other", "model.pt2"), "there are no data .*: give --data"),
        (
            ("compare", "report_models:other", "model.pt2", "--data", "data.npz"),
            "returns 4x5, and the quantized one 4x4: it is not the model",
        ),
        (("compare", "report_models:calibrated", "nothing.pt2"), "nothing.pt2"),
        ((*ACCURACY_ONLY, "--metric", "report_models:broken"), "metric broken failed .*no labels"),
        (
            (*ACCURACY_ONLY, "--metric", "report_models:NUMBER"),
            "NUMBER is a int, and must be a metr",
        ),
        ((*ACCURACY_ONLY, "--metric", "top1"), "top1: no metric: name a function"),
        ((*ACCURACY_ONLY, "--data", "no.npz"), "no.npz: no such file"),
        ((*ACCURACY_ONLY, "--data", "wrong.pt"), r"data batch 0, input 0 .*expected the shape"),
        (
            ["bench", "model.pt2", "--float", "report_models:alone", "--batch", "8"],
            "batch size 8: the model was quantized for 4",
        ),
        (
            [
                "report",
                "model.pt2",
                "--float",
                "report_models:calibrated",
                "--require-int8",
                "--exclude",
                "nope",
            ],
            "--exclude nope: no layer has this path",
        ),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    torch.save([torch.zeros(4, 9)], "wrong.pt")
    Path("out.html").write_text("old", encoding="utf-8")

    result = run(*arguments, "-o", "out.html")

    assert result.exit_code == 1
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(message, line)
    assert "Traceback" not in result.output
    assert Path("out.html").read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "report.txt"), "report.txt: a report is a .html or a .json file"),
        (("-o", "no/report.html"), "no such folder: no"),
        (("-o", "/proc/report.html"), "/proc/report.html cannot be written"),
        (("--threads", "two"), "'two': numbers of at least 1"),
        (("--batch", "1,0"), "'1,0': numbers of at least 1"),
        (("--rounds", "5"), "--rounds"),
    ],
)
def test_wrong_usage_is_said_at_once(arguments: tuple[str, ...], message: str) -> None:
    result = run("bench", "model.pt2", "--float", "report_models:alone", *arguments)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("output", [(), ("-o", "out.html"), ("-o", "out.json", "-o", "x.html")])
def test_ctrl_c_leaves_a_partial_file(
    output: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_stages, "graph_errors", interrupted)
    for name in ("out.html", "out.json"):
        Path(name).write_text("old", encoding="utf-8")

    result = run(*ACCURACY_ONLY, *output)

    assert result.exit_code == 130
    name = "out.partial.json" if output else "report.partial.json"
    assert f"stopped: what was measured until then is in {name}" in result.stderr
    values = json.loads(Path(name).read_text(encoding="utf-8"))
    assert values["is_partial"] is True
    assert values["unfinished"] == ["accuracy"]
    assert Path("out.html").read_text(encoding="utf-8") == "old"
    assert Path("out.json").read_text(encoding="utf-8") == "old"


def test_ctrl_c_with_json_prints_the_partial_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_stages, "graph_errors", interrupted)

    result = run(*ACCURACY_ONLY, "--json")

    assert result.exit_code == 130
    assert json.loads(result.stdout)["is_partial"] is True
