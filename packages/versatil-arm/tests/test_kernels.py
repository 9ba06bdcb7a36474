"""On an Arm CPU, every quantized layer is exact, and runs on the Arm Compute Library's int8 product."""

import itertools
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch.export import Dim

import versatil_core
from versatil_arm import ArmInductorBackend
from versatil_core import audit, check_exactness, lower, quantize, sqnr_db

if TYPE_CHECKING:
    from conftest import Primitives

# On torch 2.9 and 2.10, whose int8 kernels on aarch64 were looked at.
pytestmark = pytest.mark.arm

FAST = "matmul,lowp_gemm:acl"
OPTIONS = [
    pytest.param(
        {"is_per_channel": is_per_channel, "activation_dtype": dtype, "is_dynamic": is_dynamic},
        id=f"{'channel' if is_per_channel else 'tensor'}-{dtype}-{'dynamic' if is_dynamic else 'static'}",
    )
    for is_per_channel, dtype, is_dynamic in itertools.product(
        (True, False), ("int8", "uint8"), (False, True)
    )
]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_layer_is_exact_and_on_the_fast_kernel(
    options: dict[str, Any],
    model: torch.nn.Module,
    batch: torch.Tensor,
    primitives: "Primitives",
) -> None:
    backend = ArmInductorBackend(**options)
    reference = quantize(model, batch, backend, None if backend.is_dynamic else [batch])
    lowered = lower(reference, backend)

    result, ran = primitives(lambda: lowered(3 * batch))  # also beyond the calibrated range

    assert audit(reference, backend).int8_count == 6
    assert ran == [FAST] * 6
    check_exactness(reference, lowered, (3 * batch,)).raise_if_inexact()
    assert sqnr_db(result, reference(3 * batch)) > 60


class Head(nn.Module):
    """Any layers, and a linear; small, since each compilation takes up to a minute under emulation."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).relu().flatten(2).mean(2))


def layers_of(kind: str) -> list[nn.Module]:
    if kind == "strided":
        return [nn.Conv2d(3, 8, 3, stride=2, padding=1)]
    if kind == "dilated":
        return [nn.Conv2d(3, 8, 3, padding=2, dilation=2)]
    if kind == "row":
        return [nn.Flatten(2), nn.Conv1d(3, 8, 3, padding=1)]
    return [nn.Conv2d(3, 8, 1, stride=2)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("strided", {"activation_dtype": "int8"}),
        ("dilated", {"activation_dtype": "uint8", "is_per_channel": False, "is_dynamic": True}),
        ("row", {"activation_dtype": "uint8"}),
    ],
)
def test_compiled_models_use_the_fast_kernel(
    kind: str, options: dict[str, Any], primitives: "Primitives"
) -> None:
    torch.manual_seed(0)
    backend, x = ArmInductorBackend(**options), torch.randn(2, 3, 8, 8)
    model = Head(*layers_of(kind)).eval()
    reference = quantize(model, x, backend, None if backend.is_dynamic else [x])
    before = inductor_config.get_config_copy()

    compiled = versatil_core.compile(reference, backend)
    compiled(x)
    result, ran = primitives(lambda: compiled(3 * x))

    assert inductor_config.get_config_copy() == before
    assert ran == [FAST] * 2
    assert sqnr_db(result, reference(3 * x)) > 60


def test_a_compiled_model_takes_other_batch_sizes(primitives: "Primitives") -> None:
    torch.manual_seed(0)
    backend, x = ArmInductorBackend(is_per_channel=False), torch.randn(2, 3, 8, 8)
    reference = quantize(
        Head(*layers_of("strided")).eval(),
        x,
        backend,
        [x],
        dynamic_shapes={"x": {0: Dim("n", min=2, max=64)}},
    )
    compiled = versatil_core.compile(reference, backend)
    compiled(x)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    for size in (7, 3):
        other = torch.randn(size, 3, 8, 8)
        result, ran = primitives(lambda other=other: compiled(other))  # type: ignore[misc]

        assert ran == [FAST] * 2
        assert sqnr_db(result, reference(other)) > 60
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # compiled once


@pytest.mark.skipif(
    "versatil_arm" not in entry_points(group="torch_dynamo_backends").names,
    reason="runs on the sources: entry points belong to an installed distribution",
)
def test_torch_compile_knows_the_backend_by_name(primitives: "Primitives") -> None:
    torch.manual_seed(0)
    backend = ArmInductorBackend(is_dynamic=True)
    x = torch.randn(2, 3, 8, 8)
    reference = quantize(Head(*layers_of("pointwise")).eval(), x, backend)
    before = inductor_config.get_config_copy()

    compiled = torch.compile(reference, backend="versatil_arm")
    with torch.no_grad():
        compiled(x)
        result, ran = primitives(lambda: compiled(x))

    assert inductor_config.get_config_copy() == before
    assert ran == [FAST] * 2
    assert sqnr_db(result, reference(x)) > 60
