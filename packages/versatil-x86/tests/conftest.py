"""What some versions of torch cannot do."""

import pytest

from versatil_x86._torch_compat import has_dynamic_conv_kernel


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker."""
    config.addinivalue_line(
        "markers", "dynamic_convolution: takes an int8 kernel for convolutions with a dynamic scale"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what takes a kernel that this torch cannot trace; test_rules.py says what happens instead."""
    reason = "torch 2.9 has no shape function for a dynamic convolution's kernel: it stays float"
    for item in items:
        if item.get_closest_marker("dynamic_convolution") and not has_dynamic_conv_kernel():
            item.add_marker(pytest.mark.skip(reason=reason))
