"""The contract between versatil and a hardware package."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from versatil_core.environment import environment_variables, set_environment_variables
from versatil_core.host import read_host
from versatil_core.inductor_settings import InductorSettings
from versatil_passes.lowering_rules import LoweringRules

if TYPE_CHECKING:
    from torchao.quantization.pt2e.quantizer import Quantizer


class BasePT2EBackend(ABC):
    """What a hardware package provides; it derives one class from this one.

    A backend is registered as an entry point of the group ``versatil.backends`` under its
    :attr:`name`. Each option of its constructor is kept in an attribute of the same name and
    is a JSON value, so that a saved model can name the backend that it was quantized for.

    Attributes:
        name: The registered name, which is also written into saved models.
        supported_device_types: Types of the devices that model and inputs may be on.
        is_dynamic: Whether activations are quantized with a scale measured at every call.
        is_qat: Whether the quantizer inserts fake quantization for training.
        float_dtype: ``"bfloat16"`` makes the float parts between int8 layers compute in bfloat16; a backend
            without this option leaves it at ``"float32"``.
    """

    name: str
    supported_device_types: tuple[str, ...] = ("cpu",)
    is_dynamic: bool
    is_qat: bool
    float_dtype: str = "float32"

    @property
    @abstractmethod
    def inductor_settings(self) -> InductorSettings:
        """The Inductor and environment values this backend pins, each with its reason."""

    @property
    @abstractmethod
    def lowering_rules(self) -> LoweringRules:
        """What the int8 lowering may do on this hardware."""

    @abstractmethod
    def create_quantizer(self, module_path: str = "") -> "Quantizer":
        """Return a torchao quantizer that annotates one submodule and nothing else.

        Args:
            module_path: Dotted name as in ``named_modules()``; ``""`` is the whole model.

        Returns:
            A quantizer for ``prepare_pt2e``, alone or in a ``ComposableQuantizer``.
        """

    @property
    def option_reasons(self) -> Mapping[str, str]:
        """Option -> why it has its value, for options that were chosen for a reason worth telling.

        Kept in saved models, and shown by :func:`versatil_core.audit` and ``versatil doctor``.
        """
        return {}

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """Instruction sets that code and kernels may use on this machine, by their kernel names.

        A packaged model runs where all that it was made with are here.
        """
        return read_host().instruction_sets

    def environment_context(self) -> AbstractContextManager[None]:
        """Set the backend's environment variables and Inductor values in a ``with`` block.

        A plain ``torch.compile`` of a reference inside the block makes the backend's int8
        kernels, provided that it also compiles inside: compilation happens at the first call.
        Everything is as before at the end, also after an exception.
        """
        return _environment_context(self)

    def activate_environment(self) -> None:
        """Do the same as :meth:`environment_context`, and leave it so.

        For a compilation that happens at some later first call. From torch 2.12 on Inductor's
        configuration belongs to one thread, so call this in the thread that compiles.
        """
        from versatil_core._torch_compat import set_inductor_config

        set_environment_variables(self.inductor_settings.environment_values())
        set_inductor_config(_inductor_values(self))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in backend_options(self).items())
        return f"{type(self).__name__}({options})"


@contextmanager
def _environment_context(backend: BasePT2EBackend) -> Iterator[None]:
    from versatil_core._torch_compat import patch_inductor_config

    with (
        environment_variables(backend.inductor_settings.environment_values()),
        patch_inductor_config(_inductor_values(backend)),
    ):
        yield


def _inductor_values(backend: BasePT2EBackend) -> dict[str, Any]:
    """Return the pinned values together with the pass chain that makes the int8 kernels."""
    from versatil_core.compile import inductor_values

    return dict(inductor_values(backend))


def backend_options(backend: BasePT2EBackend) -> dict[str, Any]:
    """Return the constructor options with which an equal backend can be made.

    Args:
        backend: Any backend.

    Returns:
        Option -> value, in the order of the constructor; see
        :func:`versatil_core.discovery.create_backend` for the way back.
    """
    parameters = inspect.signature(type(backend)).parameters
    return {name: getattr(backend, name) for name in parameters}
