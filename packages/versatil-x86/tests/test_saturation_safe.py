"""``make_saturation_safe``: a model that was quantized for VNNI becomes exact on CPUs without."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from versatil_core import (
    Audit,
    LoweringError,
    QuantizationTarget,
    SaturationWarning,
    audit,
    check_exactness,
    export,
    load,
    lower,
    quantize,
    read_manifest,
    reference_info,
    save,
    sqnr_db,
)
from versatil_passes import LoweringRules
from versatil_x86 import CPUFeatures, X86InductorBackend, make_saturation_safe
from versatil_x86.pair_safe_weights import PAIRS_WITHOUT_VNNI
from versatil_x86.rules import x86_lowering_rules


class WithoutVNNI(X86InductorBackend):
    """What the backend is on a CPU with AVX2 alone, whatever this one is."""

    @property
    def lowering_rules(self) -> LoweringRules:
        return x86_lowering_rules(CPUFeatures(avx2=True))


IGNORE = WithoutVNNI(saturation="ignore")
HAS_VNNI = CPUFeatures.detect().has_vnni
BRANCH = f"on this CPU ({CPUFeatures.detect()}), {'with' if HAS_VNNI else 'without'} VNNI"


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


class Network(nn.Module):
    """``plain`` and ``mixed`` have pairs that may saturate; of ``mixed`` only one channel. The others are safe."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(4, 8, 3)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.mixed = nn.Linear(8, 16)
        self.alternating = nn.Linear(16, 6)
        with torch.no_grad():
            self.plain.weight.uniform_(0.5, 1.0)
            self.depthwise.weight.uniform_(0.5, 1.0)
            self.mixed.weight.copy_(alternating(16, 8))
            self.mixed.weight[3].uniform_(0.5, 1.0)
            self.alternating.weight.copy_(alternating(6, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.depthwise(torch.relu(self.plain(x)))).mean((2, 3))
        return self.alternating(torch.relu(self.mixed(y)))


def alternating(rows: int, columns: int) -> Tensor:
    """Weights of opposite signs next to each other: they cannot do harm."""
    return (torch.rand(rows, columns) + 0.5) * torch.tensor([1.0, -1.0]).repeat(columns // 2)


def images(count: int = 8) -> Tensor:
    return torch.rand(count, 4, 8, 8)


def int8_of(reference: GraphModule, module_path: str) -> tuple[Tensor, Tensor]:
    """The int8 weight and the scales that the layer of a module reads."""
    names = {layer.module_path: layer.node for layer in audit(reference, IGNORE).layers}
    [layer] = [node for node in reference.graph.nodes if node.name == names[module_path]]
    weight, scale = layer.args[1].args[:2]
    state = reference.state_dict()
    return state[str(weight.target)], state[str(scale.target)]


def saturating(reference: GraphModule) -> list[str]:
    found: Audit = audit(reference, IGNORE)
    return [layer.module_path for layer in found.saturating_layers]


def test_before_and_after() -> None:
    model, x = Network().eval(), images()
    reference = quantize(model, x, IGNORE, [x])
    before, results = copy.deepcopy(reference.state_dict()), reference(x)

    assert saturating(reference) == ["plain", "mixed"]
    assert "may saturate here" in str(audit(reference, IGNORE))
    with pytest.warns(SaturationWarning, match=r"plain, mixed.*make_saturation_safe\(reference\)"):
        lowered = lower(reference, IGNORE)
    report = check_exactness(reference, lowered, (torch.ones_like(x),))
    assert report.is_exact is HAS_VNNI, BRANCH

    safe = make_saturation_safe(reference)

    assert saturating(safe) == []
    assert "may saturate here" not in str(audit(safe, IGNORE))
    lowered = lower(safe, IGNORE)  # and no warning, which would be an error
    for inputs in (x, torch.ones_like(x), 10 * x):
        check_exactness(safe, lowered, (inputs,), float_model=model).raise_if_inexact()
    # The reference is as it was.
    after = reference.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(reference(x), results)
    assert saturating(reference) == ["plain", "mixed"]


def test_only_the_channels_that_may_saturate_change() -> None:
    x = images()
    reference = quantize(Network().eval(), x, IGNORE, [x])

    safe = make_saturation_safe(reference)

    for path in ("depthwise", "alternating"):
        for old, new in zip(int8_of(reference, path), int8_of(safe, path), strict=True):
            assert torch.equal(old, new)
    (old_values, old_scale), (values, scale) = (int8_of(m, "mixed") for m in (reference, safe))
    others = torch.arange(16) != 3
    assert torch.equal(values[others], old_values[others])
    assert torch.equal(scale[others], old_scale[others])
    assert scale[3] > 1.3 * old_scale[3]
    assert (PAIRS_WITHOUT_VNNI.largest_sums(values) <= 128).all()
    old, new = old_values[3] * old_scale[3], values[3] * scale[3]
    assert sqnr_db(new, old) > 35


@pytest.mark.parametrize(
    "is_dynamic",
    [False, pytest.param(True, marks=pytest.mark.dynamic_convolution)],
    ids=["static", "dynamic"],
)
def test_it_is_nearly_as_good_as_quantizing_again(*, is_dynamic: bool) -> None:
    model, x = Network().eval(), images(32)
    calibration = None if is_dynamic else [x]
    ignore = WithoutVNNI(is_dynamic=is_dynamic, saturation="ignore")
    reference = quantize(model, x, ignore, calibration)
    again = quantize(model, x, WithoutVNNI(is_dynamic=is_dynamic, saturation="safe"), calibration)

    safe = make_saturation_safe(reference)

    assert saturating(reference) == ["plain", "mixed"]
    assert saturating(safe) == saturating(again) == []
    assert sqnr_db(safe(x), model(x)) > sqnr_db(again(x), model(x)) - 1.5
    check_exactness(safe, lower(safe, ignore), (10 * x,)).raise_if_inexact()


def test_the_manifest_says_so(tmp_path: Path) -> None:
    x = images()
    reference = quantize(Network().eval(), x, IGNORE, [x])

    safe = make_saturation_safe(reference)
    save(safe, tmp_path / "safe.pt2")
    loaded = load(tmp_path / "safe.pt2")

    for info in (read_manifest(tmp_path / "safe.pt2").info, reference_info(loaded)):
        [target] = info.targets
        assert target.options["saturation"] == "safe"
        assert "make_saturation_safe" in target.reasons["saturation"]
    assert reference_info(reference).targets[0].options["saturation"] == "ignore"
    assert torch.equal(loaded(x), safe(x))
    assert saturating(loaded) == []
    save(reference, tmp_path / "reference.pt2")
    again = make_saturation_safe(load(tmp_path / "reference.pt2"))  # the way a user would go
    assert torch.equal(again(x), safe(x))


def test_the_old_weights_are_gone() -> None:
    x = images()
    reference = quantize(Network().eval(), x, IGNORE, [x])

    safe = make_saturation_safe(reference)

    def size(module: GraphModule) -> int:
        return sum(value.nbytes for value in module.state_dict().values())

    assert size(safe) <= size(reference)


@pytest.mark.parametrize("saturation", ["safe", "reduce_range"])
def test_what_is_safe_already_is_unchanged(saturation: str) -> None:
    x = images()
    backend = WithoutVNNI(saturation=saturation)
    reference = quantize(Network().eval(), x, backend, [x])

    safe = make_saturation_safe(reference)

    assert safe is not reference
    assert torch.equal(safe(x), reference(x))
    old, new = reference.state_dict(), safe.state_dict()
    assert old.keys() == new.keys()
    assert all(torch.equal(value, new[name]) for name, value in old.items())
    assert reference_info(safe).targets == reference_info(reference).targets


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        with torch.no_grad():
            self.first.weight.uniform_(0.5, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) + self.first(x)


def test_tied_weights() -> None:
    model, x = Tied().eval(), torch.rand(4, 8)
    reference = quantize(model, x, IGNORE, [x])
    assert saturating(reference) == ["first", "second", "first"]

    safe = make_saturation_safe(reference)

    assert saturating(safe) == []
    assert sqnr_db(safe(x), model(x)) > 30
    check_exactness(safe, lower(safe, IGNORE), (10 * x,)).raise_if_inexact()


@pytest.mark.parametrize("other", ["ignore", "reduce_range"])
def test_a_weight_that_two_targets_share_obeys_each_one_s_bound(other: str) -> None:
    x = torch.rand(4, 8)
    targets = [
        QuantizationTarget("first", WithoutVNNI(saturation=other)),
        QuantizationTarget("second", WithoutVNNI(saturation="safe")),
    ]

    reference = quantize(Tied().eval(), x, targets, [x])

    layers = audit(reference, WithoutVNNI()).layers
    assert not any(layer.may_saturate for layer in layers if layer.module_path == "second")
    assert not torch.equal(int8_of(reference, "first")[0], int8_of(reference, "second")[0])


def test_a_reference_of_torchao() -> None:
    """It says nothing about itself, and has other names."""
    model, x = Network().eval(), images()
    with torch.no_grad():
        exported = torch.export.export(model, (x,)).module()
        prepared = prepare_pt2e(exported, X86InductorBackend().create_quantizer())
        prepared(x)
        reference = convert_pt2e(prepared)
    assert len(saturating(reference)) == 2

    safe = make_saturation_safe(reference)

    assert saturating(safe) == []
    check_exactness(safe, lower(safe, IGNORE), (x,)).raise_if_inexact()
    assert sqnr_db(safe(x), model(x)) > 20


def test_one_scale_for_the_whole_weight() -> None:
    """Per-tensor weights get a scale for each channel."""
    x = torch.rand(4, 8)
    reference = quantize(Tied().eval(), x, IGNORE, [x])
    qd: Any = torch.ops.quantized_decomposed
    with torch.no_grad():
        for node in [*reference.graph.nodes]:
            if node.target is qd.dequantize_per_channel.default:
                with reference.graph.inserting_before(node):
                    new = reference.graph.call_function(
                        qd.dequantize_per_tensor.default,
                        (node.args[0], 0.01, 0, -128, 127, torch.int8),
                    )
                node.replace_all_uses_with(new)
                reference.graph.erase_node(node)
    reference.recompile()
    assert len(saturating(reference)) == 3

    safe = make_saturation_safe(reference)

    assert saturating(safe) == []
    assert sqnr_db(safe(x), reference(x)) > 30
    check_exactness(safe, lower(safe, IGNORE), (x,)).raise_if_inexact()


def test_what_is_no_reference_is_refused() -> None:
    x = torch.rand(4, 8)
    reference = quantize(Tied().eval(), x, WithoutVNNI(saturation="safe"), [x])

    with pytest.raises(LoweringError, match="lowered already"):
        make_saturation_safe(lower(reference, IGNORE))
    with pytest.raises(LoweringError, match="not a Tied"):
        make_saturation_safe(Tied())  # type: ignore[arg-type] # that is the point
    with pytest.raises(LoweringError, match="no int8 layer"):
        make_saturation_safe(export(Tied(), x))


class TiedTable(nn.Module):
    """A table that is also the weight of a linear, with pairs that may saturate."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        with torch.no_grad():
            self.table.weight.uniform_(0.5, 1.0)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table(ids)
        return rows, self.head(rows)


def test_an_embedding_keeps_its_table() -> None:
    """Looking up adds nothing, so nothing saturates: only the linear's weight changes."""
    ids = torch.arange(12)
    reference = quantize(TiedTable().eval(), ids, IGNORE, [ids])

    safe = make_saturation_safe(reference)

    assert [layer.module_path for layer in audit(reference, IGNORE).saturating_layers] == ["head"]
    found = audit(safe, IGNORE)
    assert found.saturating_layers == found.float_layers == ()
    assert torch.equal(safe(ids)[0], reference(ids)[0])
    check_exactness(safe, lower(safe, IGNORE), (ids,)).raise_if_inexact()


def test_a_model_of_embeddings_alone_has_nothing_to_rescale() -> None:
    ids = torch.arange(12)
    reference = quantize(nn.Embedding(12, 8).eval(), ids, IGNORE, [ids])

    with pytest.raises(LoweringError, match="no int8 layer"):
        make_saturation_safe(reference)
