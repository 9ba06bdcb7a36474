"""What torchao does on Arm by itself, printed; test_upstream_facts.py runs it with ONEDNN_VERBOSE=1 and reads it.

A program of its own, since importing torchao's quantizer changes Inductor for the whole process.
"""

import sys
from dataclasses import replace

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torchao.quantization.pt2e import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationConfig
from torchao.quantization.pt2e.quantizer import arm_inductor_quantizer as arm


class Model(nn.Module):
    """Two linears, and a convolution that runs after them, so that they have run when it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 64)
        self.conv = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(torch.relu(self.first(x))))
        return self.conv(y.reshape(2, 16, 4, 8))


def quantized(config: QuantizationConfig, model: nn.Module, x: Tensor) -> torch.fx.GraphModule:
    """As torchao's documentation has it; strict export, with which its quantizer finds layers."""
    exported = torch.export.export(model, (x,), strict=True).module()
    prepared = prepare_pt2e(exported, arm.ArmInductorQuantizer().set_global(config))
    prepared(x)
    reference: torch.fx.GraphModule = convert_pt2e(prepared)
    return reference


def say(*words: object) -> None:
    """Print a line at once, so that it stands in order with what oneDNN prints."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the default recipe, and the one with a scale for each output channel."""
    torch.manual_seed(0)
    inductor_config.freezing = True
    model, x = Model().eval(), torch.randn(16, 16)
    default = arm.get_default_arm_inductor_quantization_config()
    weight = replace(
        default.weight,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
    )
    for name, config in (("tensor", default), ("channel", replace(default, weight=weight))):
        say("SCHEME", name, config.weight.qscheme)
        with torch.no_grad():
            reference = quantized(config, model, x)
            targets = [str(node.target) for node in reference.graph.nodes]
            say("QUANTIZED", name, sum("dequantize" in t for t in targets))
            compiled = torch.compile(reference)
            say("FIRST CALL", name)
            try:
                compiled(x)
            except RuntimeError as error:
                say("FAILED", name, str(error).replace("\n", " "))
            say("END", name)


main()
