"""Every pinned value exists, has a reason, and takes effect."""

import os

import torch._inductor.config as inductor_config

from versatil_x86 import X86InductorBackend
from versatil_x86.settings import X86_SETTINGS


def test_the_values() -> None:
    assert X86_SETTINGS.config_values() == {
        "freezing": True,
        "cpp_wrapper": True,
        "fx_graph_cache": False,
    }
    assert X86_SETTINGS.environment_values() == {"CUDA_VISIBLE_DEVICES": ""}


def test_every_setting_has_a_reason() -> None:
    for setting in (*X86_SETTINGS.config, *X86_SETTINGS.environment):
        assert len(setting.reason.split()) > 5, setting.name


def test_they_take_effect_inside_the_context_only() -> None:
    """Case 29."""
    before = (inductor_config.freezing, inductor_config.cpp_wrapper)
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")

    with X86InductorBackend().environment_context():
        assert inductor_config.freezing is True
        assert inductor_config.cpp_wrapper is True
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""

    assert (inductor_config.freezing, inductor_config.cpp_wrapper) == before
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == variable
