import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule

from versatil_passes import Int8Lowering
from versatil_passes.int8_ops import Int8Call, is_int8_op, operators

SCHEMAS = """
import sys
import torch
def names():
    return {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("versatil::")}
"""


class _Recorder(torch.fx.Interpreter):
    """Keep the arguments and the result of the neutral operator."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if is_int8_op(n):
            self.args, self.result = self.fetch_args_kwargs_from_env(n)[0], result
            self.target = n.target
        return result


def _run(form: Any, rules: Any) -> _Recorder:
    module, inputs = form.build()
    Int8Lowering(rules)(module.graph)
    recorder = _Recorder(GraphModule(module, module.graph))
    with torch.no_grad():
        recorder.run(*inputs)
    return recorder


def test_the_fake_result_is_like_the_real_one(form: Any, build: Any) -> None:
    """Inductor plans memory by it."""
    recorder = _run(form, build.rules)
    mode = FakeTensorMode()
    args = [
        mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
        for value in recorder.args
    ]
    with mode:
        fake = recorder.target(*args)  # type: ignore[operator]
    real = recorder.result
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(
    "name", ["linear", "linear_3d_add_relu_computed", "linear_dynamic", "conv1d", "conv2d_dynamic"]
)
def test_opcheck(name: str, build: Any) -> None:
    recorder = _run(build.forms[name], build.rules)
    assert isinstance(recorder.target, torch._ops.OpOverload)
    torch.library.opcheck(
        recorder.target, tuple(recorder.args), test_utils=("test_schema", "test_faketensor")
    )


def test_a_linear_whose_input_is_not_contiguous(build: Any) -> None:
    module, (x,) = build.linear((4, 5, 16)).build()
    Int8Lowering(build.rules)(module.graph)
    recorder = _Recorder(GraphModule(module, module.graph))
    recorder.run(x)
    call = Int8Call.from_args(tuple(recorder.args))
    transposed = call.qx.transpose(0, 1)
    args = (transposed, *recorder.args[1:])
    real = recorder.target(*args)  # type: ignore[operator]
    mode = FakeTensorMode()
    with mode:
        fake_args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake = recorder.target(*fake_args)  # type: ignore[operator]
    torch.testing.assert_close(real, recorder.result.transpose(0, 1))
    assert (fake.shape, fake.stride()) == (real.shape, real.stride())


def _call(**changes: Any) -> Int8Call:
    return Int8Call(*("qx", 0.5, 3, "weight", "w_scale", None), **changes)


@pytest.mark.parametrize(
    "call",
    [
        _call(),
        _call(other="other", other_scale=0.25, other_zero_point=7, post_op="relu"),
        _call(geometry=([1, 2], [0, 0], [1, 1], 4), post_op="hardtanh", post_op_args=(-1.0, 1.0)),
        _call(
            output_scale=0.5,
            output_zero_point=4,
            output_quant_min=1,
            output_quant_max=99,
            output_dtype=torch.uint8,
        ),
    ],
)
def test_arguments_there_and_back(call: Int8Call) -> None:
    assert Int8Call.from_args(call.args()) == call


def test_arguments_are_those_of_the_schema() -> None:
    schema_names = {argument.name for argument in operators().qconv.tensor._schema.arguments}
    names = {field.name for field in fields(Int8Call)} - {"geometry"}
    assert schema_names == names | {"stride", "padding", "dilation", "groups"}
    for overload in (operators().qlinear.default, operators().qconv.default):
        call = _call(geometry=None if "qlinear" in str(overload) else ([1], [0], [1], 1))
        assert len(call.args()) == len(overload._schema.arguments)
        assert call.target is overload


@pytest.mark.parametrize(
    ("changes", "is_narrow"),
    [
        ({}, False),
        ({"output_dtype": torch.uint8, "output_quant_max": 255}, False),
        ({"output_dtype": torch.uint8, "output_quant_max": 127}, True),
        ({"output_dtype": torch.uint8, "output_quant_min": 1, "output_quant_max": 255}, True),
        ({"output_dtype": torch.int8, "output_quant_min": -128, "output_quant_max": 127}, False),
        ({"output_dtype": torch.int8, "output_quant_min": -127, "output_quant_max": 127}, True),
    ],
)
def test_narrow_outputs(changes: dict[str, Any], *, is_narrow: bool) -> None:
    assert _call(**changes).is_output_narrow is is_narrow


def test_every_op_is_functional() -> None:
    for packet in (operators().qlinear, operators().qconv):
        for overload in packet.overloads():
            assert not getattr(packet, overload)._schema.is_mutable


def _subprocess(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", SCHEMAS + code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_defines_nothing_and_use_defines_all() -> None:
    """The second half shows that the first can fail."""
    code = """
import versatil_passes
import versatil_passes.int8_ops
assert names() == set(), names()
versatil_passes.int8_ops.operators()
print(sorted(names()))
"""
    assert _subprocess(code) == "['versatil::qconv', 'versatil::qlinear']"


def test_two_threads_define_the_ops_once() -> None:
    code = """
import threading
from versatil_passes.int8_ops import operators
barrier, failures = threading.Barrier(8), []
def run():
    barrier.wait()
    try:
        operators().qlinear.default
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=run) for _ in range(8)]
sys.setswitchinterval(1e-6)
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
print("ok")
"""
    assert _subprocess(code) == "ok"
