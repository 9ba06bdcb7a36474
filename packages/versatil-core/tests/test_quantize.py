"""quantize() makes a reference, and leaves the model it is given alone."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.fx import GraphModule

from versatil_core import (
    CalibrationError,
    ExportError,
    NothingQuantizedError,
    QuantizationTarget,
    TargetError,
    TrainingUnsupportedError,
    UnsupportedDeviceError,
    calibrate,
    convert,
    export,
    prepare,
    quantize,
    reference_info,
)

Backend = Callable[..., Any]


class Classifier(torch.nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls.add_(1)
        for layer in self.encoder:
            x = torch.relu(layer(x))
        return self.head(self.drop(x))


def batches(count: int = 4, size: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 8, generator=generator) for _ in range(count)]


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(20 * torch.log10(want.norm() / (got - want).norm()).detach())


def count(module: GraphModule, name: str) -> int:
    return sum(name in str(node.target) for node in module.graph.nodes)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_reference_is_near_the_model(
    linear_backend: Backend, *, strict: bool, is_dynamic: bool
) -> None:
    model = Classifier().eval()
    [x, *calibration] = batches()

    reference = quantize(
        model, x, linear_backend(is_dynamic=is_dynamic), calibration, strict=strict
    )

    assert sqnr(reference(x), model(x)) > 25
    assert count(reference, "dequantize_per_channel") == 3
    assert count(reference, "choose_qparams") == (3 if is_dynamic else 0)


def test_dynamic_needs_no_calibration(linear_backend: Backend) -> None:
    """Without a forward pass the weight observers would have seen nothing: 0 dB."""
    model = Classifier().eval()
    [x, *_] = batches()

    reference = quantize(model, x, linear_backend(is_dynamic=True))

    assert sqnr(reference(x), model(x)) > 25
    assert reference_info(reference).calibration_batches == 0


@pytest.mark.parametrize("is_training", [False, True])
def test_model_is_not_changed(linear_backend: Backend, *, is_training: bool) -> None:
    model = Classifier().train(is_training)
    model.encoder[0].eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.head.bias.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name: (p.requires_grad, p.grad) for name, p in parameters.items()}

    quantize(model, batches()[0], linear_backend(), batches())

    assert {name: module.training for name, module in model.named_modules()} == modes
    for name, value in model.named_parameters():
        assert value is parameters[name]
        assert value.requires_grad == trained[name][0], name
        assert value.grad is trained[name][1], name
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_model_in_training_mode_is_quantized_as_in_eval_mode(linear_backend: Backend) -> None:
    model = Classifier().train()
    [x, *_] = batches()

    reference = quantize(model, x, linear_backend(), batches())

    assert torch.equal(reference(x), reference(x))
    assert sqnr(reference(x), model.eval()(x)) > 25


def test_reference_can_be_put_into_any_mode(linear_backend: Backend) -> None:
    [x, *_] = batches()
    reference = quantize(Classifier(), x, linear_backend(), batches())
    want = reference(x)

    assert reference.eval() is reference
    assert torch.equal(reference.train()(x), want)
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_float_weights_are_gone(linear_backend: Backend) -> None:
    reference = quantize(Classifier(), batches()[0], linear_backend(), batches())

    state = [*reference.parameters(), *reference.buffers()]
    assert [tuple(t.shape) for t in state if t.is_floating_point() and t.dim() == 2] == []
    assert sum(t.dtype == torch.int8 for t in state) == 3


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_four_steps_give_what_quantize_gives(
    linear_backend: Backend, *, is_dynamic: bool
) -> None:
    model = Classifier().eval()
    [x, *_] = batches()
    backend = linear_backend(is_dynamic=is_dynamic)

    exported = export(model, x)
    float_graph = str(exported.graph)
    prepared = prepare(exported, backend)
    seen = calibrate(prepared, batches(), x)
    reference = convert(prepared)

    assert str(exported.graph) == float_graph
    assert seen == 4
    assert torch.equal(reference(x), quantize(model, x, backend, batches())(x))
    assert torch.equal(convert(prepared)(x), reference(x)), "prepared is not used up"


def test_static_and_dynamic_in_one_model(linear_backend: Backend) -> None:
    """Case 14."""
    model = Classifier().eval()
    [x, *_] = batches()
    targets = [
        QuantizationTarget("encoder", linear_backend()),
        QuantizationTarget("head", linear_backend(is_dynamic=True)),
    ]

    for order in (targets, targets[::-1]):
        reference = quantize(model, x, order, batches())

        assert count(reference, "dequantize_per_channel") == 3
        assert count(reference, "choose_qparams") == 1
        assert sqnr(reference(x), model(x)) > 25


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("module_path", "layers"), [("head", 1), ("encoder", 2), ("encoder.0", 1), ("", 3)]
)
def test_only_the_target_is_quantized(
    linear_backend: Backend, module_path: str, layers: int, *, strict: bool
) -> None:
    """Case 06: containers that are never called match what is inside them."""
    target = QuantizationTarget(module_path, linear_backend())

    reference = quantize(Classifier(), batches()[0], target, batches(), strict=strict)

    assert count(reference, "dequantize_per_channel") == layers


@pytest.mark.parametrize("module_path", ["hed", "L['self'].encoder.0", "self.head", "encoder[0]"])
def test_a_path_that_matches_nothing_is_an_error(linear_backend: Backend, module_path: str) -> None:
    """Case 06."""
    with pytest.raises(TargetError, match="did you mean"):
        quantize(
            Classifier(), batches()[0], QuantizationTarget(module_path, linear_backend()), batches()
        )


def test_a_target_without_layers_is_an_error(linear_backend: Backend) -> None:
    with pytest.raises(NothingQuantizedError, match=r"'drop'.*looked for linear") as error:
        quantize(
            Classifier(), batches()[0], QuantizationTarget("drop", linear_backend()), batches()
        )

    assert error.value.module_path == "drop"


def test_a_model_without_layers_is_an_error(linear_backend: Backend) -> None:
    with pytest.raises(NothingQuantizedError, match="relu"):
        quantize(torch.nn.ReLU(), batches()[0], linear_backend(), batches())


@pytest.mark.parametrize("calibration", [None, [], iter(())], ids=["missing", "empty", "used up"])
def test_static_without_calibration_is_an_error_before_any_work(
    linear_backend: Backend, calibration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 11."""
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("too late"))

    with pytest.raises(CalibrationError, match="calibration"):
        quantize(Classifier(), batches()[0], linear_backend(), calibration)


def test_an_iterator_is_read_once_and_completely(linear_backend: Backend) -> None:
    reference = quantize(Classifier(), batches()[0], linear_backend(), iter(batches(7)))

    assert reference_info(reference).calibration_batches == 7


def test_the_example_does_not_widen_the_ranges_of_static_quantization(
    linear_backend: Backend,
) -> None:
    model = Classifier().eval()
    [x, *_] = batches()

    reference = quantize(model, 1000 * x, linear_backend(), batches())

    assert sqnr(reference(x), model(x)) > 25


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("strict", [False, True])
def test_dynamic_batch(linear_backend: Backend, size: int, *, strict: bool) -> None:
    """Case 15: also an example of batch size 1, and batches of that size afterwards."""
    model = Classifier().eval()
    shapes = ({0: Dim("batch", min=1, max=64)},)

    reference = quantize(
        model,
        batches(size=size)[0],
        linear_backend(),
        [*batches(), *batches(size=1)],
        dynamic_shapes=shapes,
        strict=strict,
    )

    for other in (9, 1):
        x = torch.randn(other, 8)
        assert sqnr(reference(x), model(x)) > 15


def test_a_wrong_shape_gives_a_readable_error(linear_backend: Backend) -> None:
    reference = quantize(Classifier(), batches()[0], linear_backend(), batches())

    with pytest.raises((AssertionError, RuntimeError), match=r"size\(\)\[0\] == 5"):
        reference(torch.randn(4, 8))


def test_inputs_by_name(linear_backend: Backend) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.linear(x) * mask}

    batch = {"x": torch.randn(2, 4), "mask": torch.ones(2, 1)}

    reference = quantize(Two(), batch, linear_backend(), [batch])

    assert reference(**batch)["y"].shape == (2, 4)


def test_other_devices_are_an_error_before_export(
    linear_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: pytest.fail("too late"))
    model = Classifier()

    with pytest.raises(UnsupportedDeviceError, match=r"encoder\.0\.weight is on the device 'meta'"):
        quantize(copy.deepcopy(model).to("meta"), batches()[0], linear_backend(), batches())
    with pytest.raises(UnsupportedDeviceError, match="example input 0"):
        quantize(model, batches()[0].to("meta"), linear_backend(), batches())


def test_a_model_that_cannot_be_exported_keeps_torchs_reason(linear_backend: Backend) -> None:
    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportError, match="cannot capture Branching") as error:
        quantize(Branching(), batches()[0], linear_backend(), batches())

    assert error.value.__cause__ is not None
    assert str(error.value.__cause__).splitlines()[0] in str(error.value)


def test_a_model_that_cannot_be_copied_is_an_error(linear_backend: Backend) -> None:
    model = Classifier()
    model.lock = __import__("threading").Lock()

    with pytest.raises(ExportError, match="cannot be copied"):
        quantize(model, batches()[0], linear_backend(), batches())


def test_training_is_refused(linear_backend: Backend) -> None:
    with pytest.raises(TrainingUnsupportedError, match="is_qat=False"):
        quantize(Classifier(), batches()[0], linear_backend(is_qat=True), batches())


def test_progress_goes_to_stderr(
    linear_backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize(Classifier(), batches()[0], linear_backend(), batches(), progress=True)

    assert capsys.readouterr().out == ""
