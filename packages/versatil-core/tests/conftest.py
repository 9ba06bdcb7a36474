"""A backend for tests of core alone, where no hardware package is installed."""

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from versatil_core import BasePT2EBackend, InductorSettings, PinnedSetting
from versatil_core.module_scope import is_node_inside
from versatil_passes import LoweringRules


class LinearBackend(BasePT2EBackend):
    """Quantizes linear layers, static or dynamic, with the plainest annotation there is."""

    name = "test_linear"

    def __init__(
        self, *, is_dynamic: bool = False, is_qat: bool = False, quant_max: int = 127
    ) -> None:
        self.is_dynamic = is_dynamic
        self.is_qat = is_qat
        self.quant_max = quant_max

    @property
    def inductor_settings(self) -> InductorSettings:
        return InductorSettings(
            config=(PinnedSetting("freezing", True, "constants"),),
            environment=(PinnedSetting("VERSATIL_TEST_BACKEND", "on", "to be seen"),),
        )

    @property
    def lowering_rules(self) -> LoweringRules:
        return LoweringRules(
            machine_types=("x86_64", "amd64", "aarch64", "arm64"), ops=frozenset({"linear"})
        )

    def create_quantizer(self, module_path: str = "") -> Any:
        from torchao.quantization.pt2e import (
            HistogramObserver,
            PerChannelMinMaxObserver,
            PlaceholderObserver,
        )
        from torchao.quantization.pt2e.quantizer import (
            QuantizationAnnotation,
            QuantizationSpec,
            Quantizer,
        )

        observer = PlaceholderObserver if self.is_dynamic else HistogramObserver
        activation = QuantizationSpec(
            dtype=torch.uint8,
            quant_min=0,
            quant_max=self.quant_max,
            qscheme=torch.per_tensor_affine,
            is_dynamic=self.is_dynamic,
            observer_or_fake_quant_ctr=observer.with_args(eps=2**-12),
        )
        weight = QuantizationSpec(
            dtype=torch.int8,
            quant_min=-128,
            quant_max=127,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
            observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=2**-12),
        )

        class LinearQuantizer(Quantizer):
            def annotate(self, model: GraphModule) -> GraphModule:
                for node in model.graph.nodes:
                    if node.target is torch.ops.aten.linear.default and is_node_inside(
                        node, module_path
                    ):
                        node.meta["quantization_annotation"] = QuantizationAnnotation(
                            input_qspec_map={node.args[0]: activation, node.args[1]: weight},
                            _annotated=True,
                        )
                return model

            def validate(self, model: GraphModule) -> None:
                pass

        return LinearQuantizer()


@pytest.fixture(scope="session")
def linear_backend() -> type[LinearBackend]:
    """Return the class of a backend that quantizes linear layers."""
    return LinearBackend


class TrainingBackend(LinearBackend):
    """Quantizes every layer, with fake quantization for training."""

    name = "test_training"

    def create_quantizer(self, module_path: str = "") -> Any:
        from torchao.quantization import pt2e
        from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

        from versatil_core.layer_quantizer import LayerQuantizer

        fake = pt2e.FusedMovingAvgObsFakeQuantize
        activations: dict[tuple[bool, bool], Any] = {
            (False, False): pt2e.HistogramObserver,
            (False, True): pt2e.PlaceholderObserver,
            (True, False): fake,
            (True, True): pt2e.FakeQuantize.with_args(
                observer=pt2e.MovingAverageMinMaxObserver.with_args(averaging_constant=1)
            ),
        }
        per_channel = pt2e.MovingAveragePerChannelMinMaxObserver
        activation = QuantizationSpec(
            dtype=torch.uint8,
            quant_min=0,
            quant_max=255,
            qscheme=torch.per_tensor_affine,
            is_dynamic=self.is_dynamic,
            observer_or_fake_quant_ctr=activations[self.is_qat, self.is_dynamic],
        )
        weight = QuantizationSpec(
            dtype=torch.int8,
            quant_min=-128,
            quant_max=127,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
            observer_or_fake_quant_ctr=(
                fake.with_args(observer=per_channel)
                if self.is_qat
                else pt2e.PerChannelMinMaxObserver
            ),
        )
        config = QuantizationConfig(activation, activation, weight, None, is_qat=self.is_qat)
        return LayerQuantizer(config, module_path, is_dynamic=self.is_dynamic)


@pytest.fixture(scope="session")
def training_backend() -> type[TrainingBackend]:
    """Return the class of a backend that can be trained for."""
    return TrainingBackend
