"""Every pinned value exists, has a reason, and takes effect."""

import os
from typing import Any

import torch._inductor.config as inductor_config

from versatil_arm import ArmInductorBackend
from versatil_arm.settings import ARM_SETTINGS


def test_the_values() -> None:
    assert ARM_SETTINGS.config_values() == {
        "freezing": True,
        "cpp_wrapper": True,
        "fx_graph_cache": False,
    }
    assert ARM_SETTINGS.environment_values() == {"CUDA_VISIBLE_DEVICES": ""}
    assert ArmInductorBackend().inductor_settings is ARM_SETTINGS


def test_every_setting_has_a_reason() -> None:
    for setting in (*ARM_SETTINGS.config, *ARM_SETTINGS.environment):
        assert len(setting.reason.split()) > 5, setting.name


def test_they_take_effect_inside_the_context_only() -> None:
    before = inductor_config.get_config_copy()
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")

    with ArmInductorBackend().environment_context():
        assert inductor_config.freezing is True
        assert inductor_config.cpp_wrapper is True
        assert inductor_config.fx_graph_cache is False
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        chain: Any = inductor_config.pre_grad_custom_pass
        assert "QuantLiftUp" in chain.uuid()
        assert "lowp_gemm:acl" in chain.uuid()

    assert inductor_config.get_config_copy() == before
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == variable
