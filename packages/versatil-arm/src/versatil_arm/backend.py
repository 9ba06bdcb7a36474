"""The Arm backend."""

from typing import TYPE_CHECKING, ClassVar, Self

import torch

from versatil_arm.cpu_features import CPUFeatures
from versatil_arm.options import BACKEND_NAME, check_activation_dtype, check_columns_bytes_max
from versatil_arm.rules import COLUMNS_BYTES_MAX, arm_lowering_rules
from versatil_arm.settings import ARM_SETTINGS
from versatil_core.backend import BasePT2EBackend
from versatil_core.float_dtype import check_float_dtype
from versatil_core.inductor_settings import InductorSettings
from versatil_passes.lowering_rules import LoweringRules

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer


class ArmInductorBackend(BasePT2EBackend):
    """int8 on Arm: every layer a product of int8 matrices, by the Arm Compute Library.

    All options run on the same kernel; they differ in accuracy and in what surrounds it. Quantizing works on every
    machine; :func:`versatil_core.lower` and :func:`versatil_core.compile` need an Arm CPU.

    Args:
        is_dynamic: Quantize activations with a scale measured at every call. Needs no
            calibration data; static quantization is faster.
        is_qat: Make a quantizer for quantization-aware training.
        is_per_channel: One weight scale for each output channel, which is more accurate; else
            one for the whole weight.
        activation_dtype: ``"int8"``, or ``"uint8"``, which is shifted to int8 when it is
            quantized.
        columns_bytes_max: Convolutions whose columns take more memory for each image stay float.
            In bytes; 64 MiB unless given.
        float_dtype: What float parts between int8 layers compute in: ``"float32"``, or
            ``"bfloat16"``, which takes half the memory. The dtype itself may be given, too.

    Raises:
        BackendOptionError: ``activation_dtype``, ``columns_bytes_max`` or ``float_dtype`` has
            another value.

    Example:
        >>> ArmInductorBackend(is_dynamic=True).activation_dtype
        'int8'
    """

    name: ClassVar[str] = BACKEND_NAME  # type: ignore[misc]

    def __init__(
        self,
        is_dynamic: bool = False,
        is_qat: bool = False,
        is_per_channel: bool = True,
        activation_dtype: str = "int8",
        columns_bytes_max: int = COLUMNS_BYTES_MAX,
        float_dtype: str | torch.dtype = "float32",
    ) -> None:
        self.is_dynamic = is_dynamic
        self.is_qat = is_qat
        self.is_per_channel = is_per_channel
        self.activation_dtype = check_activation_dtype(activation_dtype)
        self.columns_bytes_max = check_columns_bytes_max(columns_bytes_max)
        self.float_dtype = check_float_dtype(BACKEND_NAME, float_dtype)

    @classmethod
    def for_host(
        cls,
        *,
        is_dynamic: bool = False,
        is_qat: bool = False,
        is_per_channel: bool = True,
        activation_dtype: str = "int8",
        columns_bytes_max: int = COLUMNS_BYTES_MAX,
        float_dtype: str | torch.dtype = "float32",
        features: CPUFeatures | None = None,  # noqa: ARG003 -- all backends take one
    ) -> Self:
        """Return the backend with the options that are right on this CPU.

        They are the same on every Arm CPU: the kernel's sums are exact with and without dotprod.

        Args:
            is_dynamic: As for the class.
            is_qat: As for the class.
            is_per_channel: As for the class.
            activation_dtype: As for the class.
            columns_bytes_max: As for the class.
            float_dtype: As for the class.
            features: A CPU other than this machine's.
        """
        return cls(
            is_dynamic, is_qat, is_per_channel, activation_dtype, columns_bytes_max, float_dtype
        )

    @property
    def inductor_settings(self) -> InductorSettings:
        """The values this backend pins, each with its reason."""
        return ARM_SETTINGS

    @property
    def lowering_rules(self) -> LoweringRules:
        """What the int8 lowering may do on an Arm CPU."""
        return arm_lowering_rules(self.columns_bytes_max)

    def create_quantizer(self, module_path: str = "") -> "Quantizer":
        """Return a torchao quantizer that annotates one submodule and nothing else.

        Args:
            module_path: Dotted name as in ``named_modules()``; ``""`` is the whole model.

        Returns:
            A quantizer for ``prepare_pt2e``, alone or in a ``ComposableQuantizer``.
        """
        from versatil_arm.quantizer import arm_quantizer

        return arm_quantizer(self, module_path)
