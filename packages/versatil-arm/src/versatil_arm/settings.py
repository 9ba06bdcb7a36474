"""The Inductor and environment values that int8 on Arm needs: those of every CPU, nothing beyond."""

from versatil_core.inductor_settings import INT8_SETTINGS

ARM_SETTINGS = INT8_SETTINGS
