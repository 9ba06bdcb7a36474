"""Pinned settings are data, each with a reason."""

import dataclasses

import pytest

from versatil_core import InductorSettings, PinnedSetting


def test_values() -> None:
    settings = InductorSettings(
        config=(PinnedSetting("freezing", True, "why"), PinnedSetting("cpp.threads", 2, "why")),
        environment=(PinnedSetting("CUDA_VISIBLE_DEVICES", "", "why"),),
    )

    assert settings.config_values() == {"freezing": True, "cpp.threads": 2}
    assert settings.environment_values() == {"CUDA_VISIBLE_DEVICES": ""}


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        InductorSettings().config = ()  # type: ignore[misc]
