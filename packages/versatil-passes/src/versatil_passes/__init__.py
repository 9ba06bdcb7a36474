"""Graph passes for quantized PyTorch models: lifting, lowering to int8, composing, scoping. No hardware in here."""

from versatil_passes.__about__ import __version__
from versatil_passes.decompose_quantization import DecomposeQuantization
from versatil_passes.errors import (
    PassError,
    PassOrderError,
    RulesError,
    UnsupportedVersionError,
    VersatilError,
)
from versatil_passes.gemm_kernels import GemmKernels
from versatil_passes.int8_lowering import Int8Lowering
from versatil_passes.keep_int8 import KeepInt8
from versatil_passes.lowering_record import DeclinedOp, LoweredOp, LoweringRecord
from versatil_passes.lowering_rules import LoweringRules
from versatil_passes.onednn_kernels import OneDNNKernels
from versatil_passes.pass_chain import PassChain, chain_pass
from versatil_passes.pass_scopes import pass_slots, pre_grad_passes
from versatil_passes.quant_lift_up import QuantLiftUp
from versatil_passes.quantize_layer_outputs import QuantizeLayerOutputs
from versatil_passes.saturating_pairs import SaturatingPairs
from versatil_passes.transposed_convolutions import KeepTransposedConvolutions

__all__ = [
    "DeclinedOp",
    "DecomposeQuantization",
    "GemmKernels",
    "Int8Lowering",
    "KeepInt8",
    "KeepTransposedConvolutions",
    "LoweredOp",
    "LoweringRecord",
    "LoweringRules",
    "OneDNNKernels",
    "PassChain",
    "PassError",
    "PassOrderError",
    "QuantLiftUp",
    "QuantizeLayerOutputs",
    "RulesError",
    "SaturatingPairs",
    "UnsupportedVersionError",
    "VersatilError",
    "__version__",
    "chain_pass",
    "pass_slots",
    "pre_grad_passes",
]
