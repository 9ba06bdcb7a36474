"""Numbers as people read them, where the docstrings' examples end."""

import math

import pytest

from versatil_core.number_text import decibel, duration, file_size, percent


@pytest.mark.parametrize(
    ("size", "text"), [(999, "1 kB"), (999_400, "999 kB"), (1_000_000, "1.0 MB")]
)
def test_file_size(size: int, text: str) -> None:
    assert file_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (0.000999, "999 us"),
        (0.0009997, "1.00 ms"),
        (0.9996, "1.00 s"),
        (123.4, "123 s"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_decibel_and_percent() -> None:
    assert decibel(-3.14) == "-3.1 dB"
    assert decibel(-math.inf) == "nothing in common"
    assert percent(1.0) == "100.0 %"
    assert percent(0.0009) == "0.09 %"
