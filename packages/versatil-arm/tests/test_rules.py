"""What becomes int8 on Arm, on which kernel, in how much memory; what stays float, and why."""

from dataclasses import fields

import pytest
import torch
from torch.export import Dim

from versatil_arm import ArmInductorBackend
from versatil_arm.rules import COLUMNS_BYTES_MAX, arm_lowering_rules
from versatil_core import LayerAudit, audit, check_exactness, lower, quantize
from versatil_passes import GemmKernels, Int8Lowering, LoweringRules

pytestmark = pytest.mark.portable


def layers_of(
    reference: torch.fx.GraphModule, backend: ArmInductorBackend
) -> dict[str, LayerAudit]:
    return {layer.module_path: layer for layer in audit(reference, backend).layers}


def test_the_rules() -> None:
    rules = ArmInductorBackend().lowering_rules

    assert rules == arm_lowering_rules()
    assert rules.machine_types == ("aarch64",)
    assert rules.ops == rules.dynamic_ops == {"linear", "conv1d", "conv2d"}
    assert rules.activation_dtypes == (torch.int8, torch.uint8)
    assert rules.weight_granularities == {"per_channel", "per_tensor"}
    assert rules.saturating_pairs is None  # sums are of 32 bits
    assert rules.columns_bytes_max == COLUMNS_BYTES_MAX == 64 * 2**20
    assert isinstance(Int8Lowering(rules).post_grad_pass, GemmKernels)


def test_every_option_has_the_same_rules() -> None:
    """So that the Dynamo backend, which is given no options, compiles every reference."""
    rules = [
        ArmInductorBackend(is_dynamic, False, is_per_channel, dtype).lowering_rules
        for is_dynamic in (False, True)
        for is_per_channel in (False, True)
        for dtype in ("int8", "uint8")
    ]

    for field in fields(LoweringRules):
        assert len({str(getattr(rule, field.name)) for rule in rules}) == 1


def test_the_audit_names_the_kernel_class_and_the_memory(
    model: torch.nn.Module, batch: torch.Tensor
) -> None:
    backend = ArmInductorBackend()
    reference = quantize(model, batch, backend, [batch])

    result = audit(reference, backend)

    assert {layer.kernel_class for layer in result.layers} == {"lowp_gemm:acl"}
    assert {layer.kernel for layer in result.layers} == {"onednn.qlinear_pointwise"}
    columns = {layer.module_path: layer.columns_bytes for layer in result.layers}
    assert columns == {
        "strided": 8 * 8 * 3 * 3 * 3,  # positions of the output, and what one of them reads
        "dilated": 8 * 8 * 8 * 3 * 3,
        "pointwise": 0,  # no copy
        "row": 16 * 12 * 3,
        "hidden": 0,
        "head": 0,
    }
    table = " ".join(str(result).split())
    assert "6 of 6 layers int8 (arm_inductor)" in table
    assert "lowp_gemm:acl" in table
    assert "5 kB of columns" in table  # the dilated one
    assert result.to_dict()["layers"][0]["kernel_class"] == "lowp_gemm:acl"
    assert result.to_dict()["layers"][0]["columns_bytes"] == 1728


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_columns_beyond_the_limit_keep_a_convolution_float(
    model: torch.nn.Module, batch: torch.Tensor, *, is_dynamic: bool
) -> None:
    backend = ArmInductorBackend(is_dynamic=is_dynamic, columns_bytes_max=1000)
    reference = quantize(model, batch, backend, None if is_dynamic else [batch])

    layers = layers_of(reference, backend)

    assert {path for path, layer in layers.items() if layer.is_int8} == {
        *("pointwise", "row", "hidden", "head")
    }
    for path in ("strided", "dilated"):
        reason = layers[path].reason or ""
        assert "for each image" in reason


def test_the_reason_gives_both_sizes() -> None:
    backend = ArmInductorBackend(columns_bytes_max=2_000_000)
    x = torch.randn(1, 16, 128, 128)
    reference = quantize(torch.nn.Conv2d(16, 4, 3, padding=1), x, backend, [x])

    [layer] = audit(reference, backend).layers

    assert not layer.is_int8
    assert layer.reason == (
        "what its kernel covers takes 2359 kB for each image, more than the backend allows "
        "(2000 kB)"
    )
    assert audit(reference, ArmInductorBackend()).int8_count == 1


@pytest.mark.parametrize(("limit", "is_int8"), [(4608, True), (4607, False)])
def test_the_limit_itself_is_allowed(limit: int, *, is_int8: bool) -> None:
    backend = ArmInductorBackend(columns_bytes_max=limit)
    x = torch.randn(5, 8, 8, 8)  # the batch does not count
    reference = quantize(torch.nn.Conv2d(8, 3, 3, padding=1), x, backend, [x])

    [layer] = audit(reference, backend).layers
    assert layer.is_int8 is is_int8


@pytest.mark.usefixtures("any_host")
def test_a_convolution_beyond_the_limit_is_lowered_as_float() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = torch.nn.Conv2d(4, 4, 3), torch.nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.small(self.large(x))

    x, backend = torch.randn(1, 4, 8, 8), ArmInductorBackend(columns_bytes_max=1000)
    reference = quantize(Two(), x, backend, [x])

    lowered = lower(reference, backend)

    check_exactness(reference, lowered, (x,)).raise_if_inexact()
    targets = [str(node.target) for node in lowered.graph.nodes]
    assert targets.count("aten.conv2d.default") == 1
    assert targets.count("onednn.qlinear_pointwise.default") == 1


class Spatial(torch.nn.Module):
    """A kernel larger than 1, and one of 1, over an image of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.small = torch.nn.Conv2d(8, 4, 1, stride=2)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.small(self.large(x).relu()).mean((2, 3)))


@pytest.mark.usefixtures("any_host")
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_dynamic_spatial_sizes_suit_kernels_of_1_only(*, is_dynamic: bool) -> None:
    torch.manual_seed(0)
    x, backend = torch.randn(2, 4, 12, 12), ArmInductorBackend(is_dynamic=is_dynamic)
    shapes = {"x": {2: Dim("h", min=6, max=40), 3: Dim("w", min=6, max=40)}}
    reference = quantize(Spatial(), x, backend, None if is_dynamic else [x], dynamic_shapes=shapes)

    layers = layers_of(reference, backend)

    assert "spatial sizes are dynamic" in (layers["large"].reason or "")
    assert "a dynamic batch size is fine" in (layers["large"].reason or "")
    assert layers["small"].is_int8
    assert layers["head"].is_int8
    lowered = lower(reference, backend)
    for sizes in ((12, 12), (7, 30)):
        other = torch.randn(2, 4, *sizes)
        check_exactness(reference, lowered, (other,)).raise_if_inexact()


@pytest.mark.usefixtures("any_host")
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_dynamic_batch_size_suits_every_layer(
    model: torch.nn.Module, batch: torch.Tensor, dtype: str, *, is_dynamic: bool
) -> None:
    backend = ArmInductorBackend(is_dynamic=is_dynamic, activation_dtype=dtype)
    shapes = {"x": {0: Dim("n", min=1, max=64)}}
    reference = quantize(
        model, batch, backend, None if is_dynamic else [batch], dynamic_shapes=shapes
    )

    assert audit(reference, backend).float_layers == ()
    lowered = lower(reference, backend)
    for size in (1, 2, 7):
        other = 0.5 * torch.randn(size, 3, 16, 16)
        check_exactness(reference, lowered, (other,)).raise_if_inexact()


class Unbatched(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


class Uneven(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 4, 4, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (Unbatched(), (4, 8, 8), "no batch dimension"),
        (Uneven(), (2, 4, 8), "give the padding in numbers"),
    ],
)
def test_forms_that_stay_float(model: torch.nn.Module, shape: tuple[int, ...], reason: str) -> None:
    x, backend = torch.randn(shape), ArmInductorBackend()
    reference = quantize(model, x, backend, [x])

    [layer] = audit(reference, backend).layers

    assert not layer.is_int8
    assert reason in (layer.reason or "")
