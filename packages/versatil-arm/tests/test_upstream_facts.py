"""What torch and torchao do on Arm by themselves: why this package exists. When one changes, we want to know.

Observed with torch 2.9 and torchao 0.15, and torch 2.10 and torchao 0.16, on aarch64.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torchao
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from versatil_core import load_quantizer_module

if TYPE_CHECKING:
    from conftest import Primitives

onednn = torch.ops.onednn
FAST, GENERIC = "matmul,lowp_gemm:acl", "matmul,gemm:jit"
# How many layers of two torchao annotates after non-strict export; nobody looked at other versions.
NON_STRICT = {"0.15": 0, "0.16": 0, "0.18": 2}


def linear(
    dtype: torch.dtype, *, scales: int, zero_point: int = 0, post_op: str = "none"
) -> torch.Tensor:
    weight, x = torch.ones(8, 16, dtype=torch.int8), torch.ones(5, 16, dtype=dtype)
    result: torch.Tensor = onednn.qlinear_pointwise(
        x, 0.5, zero_point, onednn.qlinear_prepack(weight, None), torch.ones(scales),
        torch.zeros(scales, dtype=torch.int64), torch.ones(8), 1.0, 0, torch.float32, post_op, [], "",
    )  # fmt: skip
    return result


def convolution(dtype: torch.dtype, *, scales: int) -> torch.Tensor:
    weight, x = torch.ones(8, 4, 3, 3, dtype=torch.int8), torch.ones(1, 4, 6, 6, dtype=dtype)
    scale, zero_points = torch.ones(scales), torch.zeros(scales, dtype=torch.int64)
    packed = onednn.qconv_prepack(weight, scale, 0.5, 0, [1, 1], [0, 0], [1, 1], 1, None)
    result: torch.Tensor = onednn.qconv_pointwise(
        x, 0.5, 0, packed, scale, zero_points, None, [1, 1], [0, 0], [1, 1], 1,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return result


@pytest.mark.arm
@pytest.mark.parametrize("zero_point", [0, 3, -128, 127])
def test_int8_with_one_weight_scale_is_fast(zero_point: int, primitives: "Primitives") -> None:
    """With any zero point. What this package makes of every layer."""
    result, ran = primitives(lambda: linear(torch.int8, scales=1, zero_point=zero_point))

    assert ran == [FAST]
    assert torch.equal(result, torch.full((5, 8), 0.5 * 16 * (1 - zero_point) + 1))


@pytest.mark.arm
def test_relu_does_not_cost_the_fast_kernel(primitives: "Primitives") -> None:
    _, ran = primitives(lambda: linear(torch.int8, scales=1, post_op="relu"))

    assert ran == [FAST]


@pytest.mark.arm
@pytest.mark.parametrize(("dtype", "scales"), [(torch.int8, 8), (torch.uint8, 8), (torch.uint8, 1)])
def test_every_other_linear_is_on_the_generic_kernel(
    dtype: torch.dtype, scales: int, primitives: "Primitives"
) -> None:
    _, ran = primitives(lambda: linear(dtype, scales=scales))

    assert ran == [GENERIC]


@pytest.mark.arm
@pytest.mark.parametrize("scales", [1, 8])
def test_convolutions_of_uint8_run_the_reference_loop(
    scales: int, primitives: "Primitives"
) -> None:
    _, ran = primitives(lambda: convolution(torch.uint8, scales=scales))

    assert ran == ["convolution,gemm_s8u8s32:ref"]


@pytest.mark.arm
@pytest.mark.parametrize("scales", [1, 8])
def test_convolutions_of_int8_are_refused(scales: int) -> None:
    with pytest.raises(RuntimeError, match="Input tensor should have uint8"):
        convolution(torch.int8, scales=scales)


@pytest.mark.parametrize("strict", [False, True])
def test_what_torchao_annotates(*, strict: bool) -> None:
    """After non-strict export, which is the default, nothing: functions are compared with their names."""
    version = ".".join(torchao.__version__.split(".")[:2])
    if version not in NON_STRICT:
        pytest.skip(f"nobody looked at torchao {version}")
    arm = load_quantizer_module("arm_inductor_quantizer")  # a copy, which registers nothing
    config = arm.get_default_arm_inductor_quantization_config()
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)), torch.randn(2, 8)
    exported = torch.export.export(model.eval(), (x,), strict=strict).module()

    prepared = prepare_pt2e(exported, arm.ArmInductorQuantizer().set_global(config))
    prepared(x)
    reference = convert_pt2e(prepared)

    weights = [n for n in reference.graph.nodes if n.op == "get_attr" and "frozen" in str(n.target)]
    assert len(weights) == (2 if strict else NON_STRICT[version])


@pytest.fixture(scope="module")
def program() -> dict[str, list[str]]:
    """The lines that torchao's own way printed, by recipe, from the first call on."""
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("upstream_program.py")],
        env={**os.environ, "ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in result.stdout.splitlines():
        if line.startswith("FIRST CALL"):
            lines = sections.setdefault(line.split()[-1], [])
        lines.append(line)
    sections["facts"] = [
        line for line in result.stdout.splitlines() if line.startswith(("SCHEME", "QUANTIZED"))
    ]
    return sections


def ran(lines: list[str]) -> list[str]:
    """The primitives, each with everything that oneDNN says of it; reorders are left out."""
    found = [line.split(",exec,cpu,")[1] for line in lines if ",exec,cpu," in line]
    return [line for line in found if not line.startswith("reorder")]


@pytest.mark.arm
def test_the_default_recipe_is_float(program: dict[str, list[str]]) -> None:
    """One scale for each weight, for which torchao has no pattern: nothing is fused, and nobody says so."""
    assert "SCHEME tensor torch.per_tensor_symmetric" in program["facts"]
    # Activation and weight of three layers: the model is quantized.
    assert "QUANTIZED tensor 6" in program["facts"]

    # After compiling, which runs the model in float: once, at the call.
    kernels = [line.split(",")[1] for line in ran(program["tensor"])]
    assert kernels[-3:] == ["gemm:acl", "gemm:acl", "indirect_gemm:acl"]
    assert not any("src:s8" in line or "src:u8" in line for line in ran(program["tensor"]))
    assert not any(line.startswith("FAILED") for line in program["tensor"])


@pytest.mark.arm
def test_linears_with_a_scale_for_each_channel_are_on_the_generic_kernel(
    program: dict[str, list[str]],
) -> None:
    """Fused with their bias, and with nothing behind it: not relu, not the next layer's quantize."""
    linears = [line for line in ran(program["channel"]) if "src:s8" in line]

    assert len(linears) == 2
    for line in linears:
        assert line.startswith(GENERIC)
        assert "bia:f32" in line
        assert "dst:f32" in line
        assert "relu" not in line


@pytest.mark.arm
def test_a_fused_convolution_fails_at_the_first_call(program: dict[str, list[str]]) -> None:
    [failure] = [line for line in program["channel"] if line.startswith("FAILED")]

    assert "Input tensor should have uint8" in failure
