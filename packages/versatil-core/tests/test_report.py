"""A whole report on a small model, and what stops one early."""

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from versatil_core import (
    ExportError,
    InputError,
    ReportError,
    ReportStoppedError,
    UnsupportedHostError,
    VerdictCode,
    quantize,
    report,
    report_stages,
    speed,
)
from versatil_core.latency import Judgement
from versatil_core.report_result import Report

ACCURACY = ["accuracy"]


class Small(nn.Module):
    """A linear in int8, an embedding in float, and a linear on int8 from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(self.table(ids))
        return self.second(hidden)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    return [torch.randint(10, (4, 3), generator=torch.Generator().manual_seed(n)) for n in range(6)]


@pytest.fixture(scope="module")
def backend(linear_backend: Any) -> Any:
    return linear_backend(quant_max=255)


@pytest.fixture(scope="module")
def reference(model: nn.Module, batches: list[torch.Tensor], backend: Any) -> GraphModule:
    return quantize(model, batches[0], backend, batches)


def top1(model: Callable[..., Any]) -> float:
    return float(model(torch.zeros(4, 3, dtype=torch.int64)).shape[0])


@pytest.fixture(scope="module")
def result(
    model: nn.Module, reference: GraphModule, backend: Any, batches: list[torch.Tensor]
) -> Report:
    threads = torch.get_num_threads()
    found = report(
        model,
        reference,
        backend,
        batches,
        metric=top1,
        rounds=6,
        threads=[1],
        parts=["accuracy", "speed"],
        title="small",
    )
    assert torch.get_num_threads() == threads
    return found


def test_layers(result: Report) -> None:
    table, first, second = result.layers

    assert (table.name, table.op, table.is_int8) == ("table", "embedding", False)
    assert table.reason
    assert (first.input_shape, first.weight_shape) == ((4, 3, 16), (16, 16))
    assert (second.output_shape, second.output_dtype) == ((4, 3, 4), "float32")
    assert [layer.is_joined for layer in result.layers] == [False, False, True]
    assert result.int8_count == 2


def test_accuracy(result: Report) -> None:
    found = result.accuracy
    assert found is not None

    assert (found.batches, found.samples, found.layer_batches) == (6, 24, 4)
    assert found.is_exact
    assert found.exact_ops == found.ops > 0
    assert found.sqnr_db is not None
    assert found.kernels_sqnr_db is not None
    assert found.cosine is not None
    assert found.equal_share is None
    assert 20 < found.sqnr_db < 60
    # The kernels add nothing to the error of the reference.
    assert found.sqnr_db == pytest.approx(found.reference_sqnr_db, abs=0.3)
    assert found.kernels_sqnr_db > 40
    assert 0.99 < found.cosine <= 1
    assert found.max_error > 0
    [metric] = found.metrics
    assert (metric.name, metric.float_value, metric.int8_value) == ("top1", 4.0, 4.0)
    table, first, second = (layer.accuracy for layer in result.layers)
    assert table is not None
    assert first is not None
    assert second is not None
    assert table.introduced_db == math.inf
    assert table.is_exact is None
    assert first.introduced_db == pytest.approx(first.accumulated_db)
    assert second.accumulated_db < second.introduced_db
    assert first.is_exact
    assert second.is_exact
    assert second.exactness == "equal" or second.exactness.endswith(" dB")
    assert [each.readers for each in result.ranges] == [("first",), ("second",)]


def test_speed(result: Report) -> None:
    [point] = result.speed

    assert (point.threads, point.batch, point.rounds) == (1, 4, 6)
    assert point.input_shapes == ((4, 3),)
    assert point.judgement in Judgement
    for timing in (point.float_eager, point.float_compiled, point.int8, point.speedup):
        assert 0 < timing.low <= timing.median <= timing.high


def test_verdict_and_environment(result: Report) -> None:
    assert result.title == "small"
    assert not result.is_partial
    assert "2 of 3 layers int8" in result.verdict.sentence
    assert "top1 4 -> 4" in result.verdict.sentence
    environment = result.environment
    assert environment.backend == "test_linear"
    assert environment.options["quant_max"] == 255
    assert environment.settings["freezing"] == "True"
    assert environment.calibration_batches == 6
    assert environment.versions["torch"]
    assert environment.date.endswith("+00:00")


def test_json(result: Report) -> None:
    values = json.loads(result.to_json())

    assert values["format_version"] == 1
    assert values["is_partial"] is False
    assert values["verdict"]["code"] == result.verdict.code
    assert values["layers"][0]["accuracy"]["introduced_db"] == "inf"
    assert float(values["layers"][0]["accuracy"]["introduced_db"]) == math.inf
    assert values["speed"][0]["judgement"] == result.speed[0].judgement
    assert values["ranges"][0]["percentiles"].keys() == {"0.1", "1", "50", "99", "99.9"}


def test_the_model_is_measured_in_eval_mode_and_left_alone(
    reference: GraphModule, backend: Any, batches: list[torch.Tensor]
) -> None:
    class Dropping(Small):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(ids), 0.5, self.training)

    torch.manual_seed(0)
    training = Dropping().train()

    found = report(training, reference, backend, batches, parts=ACCURACY)

    assert found.accuracy is not None
    assert found.accuracy.sqnr_db is not None
    assert found.accuracy.sqnr_db > 20
    assert all(module.training for module in training.modules())
    assert found.title == "Dropping"


def test_only_what_was_asked_for(
    model: nn.Module, reference: GraphModule, backend: Any, batches: list[torch.Tensor]
) -> None:
    found = report(model, reference, backend, batches, parts=ACCURACY)

    assert found.speed == ()
    assert found.size is None
    assert found.verdict.code is VerdictCode.NOT_TIMED


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data has no batches"),
        (iter(()), "data has no batches"),
        (torch.zeros(4, 3), "an iterable of batches, got one Tensor: pass .data."),
        (
            [torch.zeros(4, 3)],
            r"data batch 0, input 0 \(ids\): expected torch.int64, got torch.float",
        ),
        ([torch.zeros(4, 2, dtype=torch.int64)], r"input 0 \(ids\): expected the shape \(4, 3\)"),
        ([(torch.zeros(4, 3), torch.zeros(4))], "data batch 0 has 2 items, but the model takes 1"),
        ([{"x": torch.zeros(4, 3)}], "data batch 0 lacks the inputs ids"),
    ],
)
def test_data_that_do_not_fit(
    model: nn.Module, reference: GraphModule, backend: Any, data: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        report(model, reference, backend, data, parts=ACCURACY)


def test_inputs_by_name_fit_too(
    model: nn.Module, reference: GraphModule, backend: Any, batches: list[torch.Tensor]
) -> None:
    found = report(model, reference, backend, [{"ids": batches[0]}], parts=ACCURACY)

    assert found.accuracy is not None
    assert found.accuracy.batches == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rounds": 5}, "rounds=5: at least 6"),
        ({"threads": [0]}, "threads=.0,.: each must be at least 1"),
        ({"batch_sizes": [-1]}, "batch_sizes=.-1,.: each"),
        ({"parts": []}, "parts is empty: name some of kernels, accuracy, speed"),
        ({"parts": ["speed"], "metric": top1}, "a metric is part of the accuracy"),
        ({"parts": ["colour"]}, "'colour' is not a valid Part"),
    ],
)
def test_wrong_requests(
    model: nn.Module,
    reference: GraphModule,
    backend: Any,
    batches: list[torch.Tensor],
    wrong: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        report(model, reference, backend, batches, **wrong)


def test_what_cannot_work_is_said_before_time_is_spent(
    model: nn.Module,
    reference: GraphModule,
    backend: Any,
    batches: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled_too_early(*_: Any, **__: Any) -> None:
        pytest.fail("it was compiled before")

    monkeypatch.setattr(report_stages, "compile_int8", compiled_too_early)

    def broken(_: Any) -> float:
        return 1 / 0

    with pytest.raises(ReportError, match="metric broken failed on the float model: ZeroDiv"):
        report(model, reference, backend, batches, metric=broken)
    with pytest.raises(ReportError, match="it is not the model that was quantized"):
        report(nn.Embedding(10, 7), reference, backend, batches)
    with pytest.raises(InputError, match="batch size 8: the model was quantized for 4 samples"):
        report(model, reference, backend, batches, batch_sizes=[8])


def test_another_machine_is_refused(
    model: nn.Module,
    reference: GraphModule,
    backend: Any,
    batches: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(UnsupportedHostError, match="this machine is riscv64"):
        report(model, reference, backend, batches)


def test_ctrl_c_leaves_what_was_measured(
    model: nn.Module,
    reference: GraphModule,
    backend: Any,
    batches: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report_stages, "measure_speed", interrupted)

    with pytest.raises(KeyboardInterrupt) as caught:
        report(model, reference, backend, batches, parts=["accuracy", "speed"])

    assert isinstance(caught.value, ReportStoppedError)
    partial = caught.value.report
    assert partial.is_partial
    assert partial.unfinished == ("speed",)
    assert partial.verdict.code is VerdictCode.INCOMPLETE
    assert partial.verdict.sentence.startswith("Stopped before it was done with speed")
    assert partial.accuracy is not None
    values = json.loads(partial.to_json())
    assert values["is_partial"] is True
    assert values["unfinished"] == ["speed"]


def test_operands_are_told_apart(
    model: nn.Module, reference: GraphModule, backend: Any, batches: list[torch.Tensor]
) -> None:
    table, *_ = report(model, reference, backend, batches, parts=ACCURACY).layers
    assert (table.input_shape, table.weight_shape) == ((4, 3), (10, 16))


def test_a_model_that_cannot_be_copied(
    reference: GraphModule, backend: Any, batches: list[torch.Tensor]
) -> None:
    locked = Small()
    locked.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ExportError, match="Small cannot be copied, and it is never changed"):
        report(locked, reference, backend, batches)


def test_speed_that_was_measured_is_kept_when_stopped(
    model: nn.Module,
    reference: GraphModule,
    backend: Any,
    batches: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure = speed.measure_speed

    def second_is_stopped(*arguments: Any, **options: Any) -> Any:
        if options["threads"] == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(report_stages, "measure_speed", second_is_stopped)

    with pytest.raises(ReportStoppedError) as caught:
        report(model, reference, backend, batches, threads=[1, 2], rounds=6, parts=["speed"])

    [point] = caught.value.report.speed
    assert point.threads == 1
