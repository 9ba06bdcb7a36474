"""The x86 backend."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from versatil_core.backend import BasePT2EBackend
from versatil_core.float_dtype import check_float_dtype
from versatil_core.host import read_host
from versatil_core.inductor_settings import InductorSettings
from versatil_passes.lowering_rules import LoweringRules
from versatil_x86.cpu_features import MAX_ISA, CPUFeatures, allowed_flags
from versatil_x86.rules import x86_lowering_rules
from versatil_x86.saturation import BACKEND_NAME, SaturationChoice, choose_saturation
from versatil_x86.settings import X86_SETTINGS

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer


class X86InductorBackend(BasePT2EBackend):
    """int8 on x86: u8 activations and s8 weights, per output channel, by oneDNN.

    Args:
        is_dynamic: Quantize activations with a scale measured at every call. Needs no
            calibration data; static quantization is faster.
        is_qat: Make a quantizer for quantization-aware training.
        reduce_range: Use 7 of the 8 bits of activations, as in torchao; costs 2 to 6 dB.
        saturation: What keeps products from saturating on CPUs without VNNI. ``"safe"`` chooses
            the weights' scales for it; activations keep all 8 bits. ``"reduce_range"`` is
            ``reduce_range=True``. ``"ignore"`` does nothing: right on CPUs with VNNI. ``"auto"``
            is what this CPU needs, ``"ignore"`` or ``"safe"``. None is what ``reduce_range``
            says.
        float_dtype: What float parts between int8 layers compute in: ``"float32"``, or
            ``"bfloat16"``, which takes half the memory. The dtype itself may be given, too.

    Attributes:
        saturation: What it came to: ``"safe"``, ``"reduce_range"`` or ``"ignore"``.
        reduce_range: Whether that is ``"reduce_range"``.

    Raises:
        BackendOptionError: ``saturation`` has another value, or contradicts ``reduce_range``; or
            ``float_dtype`` has another value.

    Example:
        >>> X86InductorBackend(saturation="safe").saturation
        'safe'
    """

    name: ClassVar[str] = BACKEND_NAME  # type: ignore[misc]

    def __init__(
        self,
        is_dynamic: bool = False,
        is_qat: bool = False,
        reduce_range: bool = False,
        saturation: str | None = None,
        float_dtype: str | torch.dtype = "float32",
    ) -> None:
        self.is_dynamic = is_dynamic
        self.is_qat = is_qat
        self.float_dtype = check_float_dtype(BACKEND_NAME, float_dtype)
        self._choose(choose_saturation(saturation, reduce_range=reduce_range))

    def _choose(self, choice: SaturationChoice) -> None:
        self.saturation = choice.saturation
        self.reduce_range = choice.saturation == "reduce_range"
        self._saturation_reason = choice.reason

    @classmethod
    def for_host(
        cls,
        *,
        is_dynamic: bool = False,
        is_qat: bool = False,
        reduce_range: bool = False,
        saturation: str = "auto",
        float_dtype: str | torch.dtype = "float32",
        features: CPUFeatures | None = None,
    ) -> Self:
        """Return the backend with the options that are right on this CPU.

        That is full range with VNNI, and saturation-safe weights without.

        Args:
            is_dynamic: As for the class.
            is_qat: As for the class.
            reduce_range: As for the class; then nothing is chosen.
            saturation: As for the class.
            float_dtype: As for the class.
            features: A CPU other than this machine's.
        """
        backend = cls(is_dynamic=is_dynamic, is_qat=is_qat, float_dtype=float_dtype)
        wanted = None if reduce_range and saturation == "auto" else saturation
        choice = choose_saturation(wanted, reduce_range=reduce_range, features=features)
        backend._choose(choice)
        return backend

    @property
    def option_reasons(self) -> Mapping[str, str]:
        """Why ``saturation`` has its value."""
        return {"saturation": self._saturation_reason}

    @property
    def inductor_settings(self) -> InductorSettings:
        """The values this backend pins, each with its reason."""
        return X86_SETTINGS

    @property
    def lowering_rules(self) -> LoweringRules:
        """What the int8 lowering may do on this CPU."""
        return x86_lowering_rules(CPUFeatures.detect())

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """Instruction sets that code and kernels may use on this CPU, by their kernel names.

        Without those that ``ONEDNN_MAX_CPU_ISA`` forbids.
        """
        return allowed_flags(read_host().instruction_sets, os.environ.get(MAX_ISA, ""))

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
            saturation=self.saturation,
        )
