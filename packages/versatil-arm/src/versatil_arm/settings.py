"""The Inductor and environment values that int8 on Arm needs."""

from versatil_core.inductor_settings import InductorSettings, PinnedSetting

ARM_SETTINGS = InductorSettings(
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
