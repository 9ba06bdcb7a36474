"""The x86 backend."""

from typing import TYPE_CHECKING, ClassVar, Self

from versatil_core.backend import BasePT2EBackend
from versatil_core.inductor_settings import InductorSettings
from versatil_passes.lowering_rules import LoweringRules
from versatil_x86.cpu_features import CPUFeatures
from versatil_x86.rules import x86_lowering_rules
from versatil_x86.settings import X86_SETTINGS

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer


class X86InductorBackend(BasePT2EBackend):
    """int8 on x86: u8 activations and s8 weights, per output channel, by oneDNN.

    Args:
        is_dynamic: Quantize activations with a scale measured at every call. Needs no
            calibration data; static quantization is faster.
        is_qat: Make a quantizer for quantization-aware training.
        reduce_range: Use 7 of the 8 bits of activations. On a CPU without VNNI the kernels
            saturate otherwise; costs 3 to 5 dB.

    Example:
        >>> X86InductorBackend(reduce_range=True)
        X86InductorBackend(is_dynamic=False, is_qat=False, reduce_range=True)
    """

    name: ClassVar[str] = "x86_inductor"  # type: ignore[misc]

    def __init__(
        self, is_dynamic: bool = False, is_qat: bool = False, reduce_range: bool = False
    ) -> None:
        self.is_dynamic = is_dynamic
        self.is_qat = is_qat
        self.reduce_range = reduce_range

    @classmethod
    def for_host(cls, *, is_dynamic: bool = False, features: CPUFeatures | None = None) -> Self:
        """Return the backend with the options that are right on this CPU.

        Args:
            is_dynamic: As for the class.
            features: A CPU other than this machine's.
        """
        features = CPUFeatures.detect() if features is None else features
        return cls(is_dynamic=is_dynamic, reduce_range=not features.has_vnni)

    @property
    def inductor_settings(self) -> InductorSettings:
        """The values this backend pins, each with its reason."""
        return X86_SETTINGS

    @property
    def lowering_rules(self) -> LoweringRules:
        """What the int8 lowering may do on this CPU."""
        return x86_lowering_rules(CPUFeatures.detect())

    def create_quantizer(self, module_path: str = "") -> "Quantizer":
        """Return a torchao quantizer that annotates one submodule and nothing else.

        Args:
            module_path: Dotted name as in ``named_modules()``; ``""`` is the whole model.

        Returns:
            A quantizer for ``prepare_pt2e``, alone or in a ``ComposableQuantizer``.
        """
        from versatil_x86.quantizer import X86Quantizer

        return X86Quantizer(
            module_path,
            is_dynamic=self.is_dynamic,
            is_qat=self.is_qat,
            reduce_range=self.reduce_range,
        )
