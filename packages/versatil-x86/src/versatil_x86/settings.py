"""The Inductor and environment values that int8 on x86 needs: those of every CPU, nothing beyond."""

from versatil_core.inductor_settings import INT8_SETTINGS

X86_SETTINGS = INT8_SETTINGS
