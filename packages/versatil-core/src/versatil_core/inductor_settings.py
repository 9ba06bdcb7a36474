"""The Inductor settings and environment variables that a backend pins, each with its reason."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PinnedSetting:
    """One value that a backend pins.

    Attributes:
        name: Dotted name in ``torch._inductor.config``, or name of an environment variable.
        value: The value it gets; a ``str`` for an environment variable.
        reason: Why the backend needs it, in one sentence.
    """

    name: str
    value: Any
    reason: str


@dataclass(frozen=True)
class InductorSettings:
    """Everything that a backend pins while Inductor compiles.

    Attributes:
        config: Values of ``torch._inductor.config``. Setting the environment variable of such
            a value is not enough: Inductor reads it once, when it is imported.
        environment: Values of ``os.environ``.

    Example:
        >>> freezing = PinnedSetting("freezing", True, "int8 weights are packed as constants")
        >>> InductorSettings(config=(freezing,)).config_values()
        {'freezing': True}
    """

    config: tuple[PinnedSetting, ...] = ()
    environment: tuple[PinnedSetting, ...] = ()

    def config_values(self) -> dict[str, Any]:
        """Return ``torch._inductor.config`` name -> value."""
        return {setting.name: setting.value for setting in self.config}

    def environment_values(self) -> dict[str, str]:
        """Return environment variable -> value."""
        return {setting.name: str(setting.value) for setting in self.environment}

    def as_texts(self) -> dict[str, str]:
        """Return every pinned name -> its value as text, to be shown or written to a file."""
        return {setting.name: str(setting.value) for setting in (*self.config, *self.environment)}


# What int8 kernels on a CPU need whatever its kind; a hardware package pins these, and what it needs beyond.
INT8_SETTINGS = InductorSettings(
    config=(
        PinnedSetting(
            "freezing",
            True,
            "int8 weights are packed for the kernel at compile time, so they must be constants; "
            "without freezing no int8 kernel is made, silently",
        ),
        PinnedSetting(
            "cpp_wrapper",
            True,
            "the generated code calls the kernels from C++: the int8 kernels of small layers take "
            "less time than a call from Python",
        ),
        PinnedSetting(
            "fx_graph_cache",
            False,
            "a frozen graph holds packed weights, which cannot be serialized: torch would try after "
            "each compilation, and log the failure with a traceback",
        ),
    ),
    environment=(
        PinnedSetting(
            "CUDA_VISIBLE_DEVICES",
            "",
            "Inductor asks for GPUs while it compiles; the kernels are for the CPU, and a broken "
            "driver must not stop them",
        ),
    ),
)
