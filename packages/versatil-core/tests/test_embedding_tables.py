"""Which tables are annotated, and how."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

from versatil_core.annotations import ANNOTATION
from versatil_core.export import export
from versatil_core.layer_quantizer import LayerQuantizer, is_layer


def spec(dtype: torch.dtype) -> QuantizationSpec:
    return QuantizationSpec(dtype=dtype, observer_or_fake_quant_ctr=MinMaxObserver)


ACTIVATION, WEIGHT = spec(torch.uint8), spec(torch.int8)
INDICES = torch.tensor([[1, 2], [0, 3]])


def quantizer(**options: Any) -> LayerQuantizer:
    config = QuantizationConfig(ACTIVATION, ACTIVATION, WEIGHT, None, options.pop("is_qat", False))
    return LayerQuantizer(config, **options)


def annotated(model: nn.Module, *inputs: Tensor, **options: Any) -> list[Node]:
    """The nodes that get an annotation."""
    exported = export(model, inputs)
    quantizer(**options).annotate(exported)
    return [node for node in exported.graph.nodes if ANNOTATION in node.meta]


def recipe_of(node: Node) -> Any:
    """The one spec of an annotated embedding, which is that of its table."""
    [(table, recipe)] = node.meta[ANNOTATION].input_qspec_map.items()
    assert table is node.args[0]
    assert node.meta[ANNOTATION].output_qspec is None
    return recipe


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_has_a_scale_for_each_row(kind: Any, *, is_dynamic: bool) -> None:
    [node] = annotated(kind(10, 8), INDICES, is_dynamic=is_dynamic)

    recipe = recipe_of(node)
    assert (recipe.dtype, recipe.quant_min, recipe.quant_max) == (torch.int8, -128, 127)
    assert (recipe.qscheme, recipe.ch_axis) == (torch.per_channel_symmetric, 0)
    assert not recipe.is_dynamic


class Tied(nn.Module):
    """A language model's shape: the table of its input is the weight of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.table(indices))


def test_a_table_that_is_a_weight_has_the_recipe_of_the_weight() -> None:
    lookup, head = annotated(Tied(), INDICES)

    assert is_layer(head)
    assert lookup.args[0] is head.args[1]
    assert recipe_of(lookup) is WEIGHT


def test_a_table_whose_layer_has_no_kernel_has_its_own_recipe() -> None:
    [lookup] = annotated(Tied(), INDICES, has_kernel=lambda _: False)

    assert recipe_of(lookup) is not WEIGHT


def test_two_lookups_in_one_table_share_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)

        def forward(self, indices: Tensor) -> Tensor:
            return self.table(indices) + self.table(indices.flip(0))

    first, second = annotated(Twice(), INDICES)

    assert first.args[0] is second.args[0]


def test_only_inside_the_module_path() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(10, 8), nn.Embedding(10, 8)

        def forward(self, indices: Tensor) -> Tensor:
            return self.a(indices) + self.b(indices)

    [node] = annotated(Two(), INDICES, module_path="b")

    assert str(node.args[0]) == "b_weight"


@pytest.mark.parametrize(
    "model",
    [
        nn.Embedding(10, 4),
        nn.Embedding(10, 8).bfloat16(),
        nn.Embedding(10, 8, max_norm=1.0),
        nn.EmbeddingBag(10, 8, max_norm=1.0),
    ],
    ids=["short rows", "bf16", "max_norm", "bag with max_norm"],
)
def test_what_stays_float(model: nn.Module) -> None:
    assert annotated(model, INDICES) == []


@pytest.mark.parametrize("options", [{"sparse": True}, {"scale_grad_by_freq": True}])
def test_options_of_the_gradient_do_not_matter(options: dict[str, Any]) -> None:
    assert len(annotated(nn.Embedding(10, 8, **options), INDICES)) == 1


def test_a_sparse_gradient_is_not_trained_through() -> None:
    assert annotated(nn.Embedding(10, 8, sparse=True), INDICES, is_qat=True) == []
    assert len(annotated(nn.Embedding(10, 8), INDICES, is_qat=True)) == 1


def test_training_sees_what_the_table_will_be() -> None:
    torch.manual_seed(0)
    exported = torch.export.export(nn.Embedding(10, 8).train(), (INDICES,)).module()
    prepared: GraphModule = prepare_qat_pt2e(exported, quantizer(is_qat=True))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    before = prepared(INDICES).detach().clone()
    for _ in range(5):
        prepared(INDICES).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = prepared(INDICES).detach()

    reference = convert_pt2e(prepared)

    assert trained.norm() < 0.5 * before.norm()
    torch.testing.assert_close(reference(INDICES), trained, rtol=0, atol=0)
    assert {value.dtype for value in reference.state_dict().values() if value.dim() == 2} == {
        torch.int8
    }
