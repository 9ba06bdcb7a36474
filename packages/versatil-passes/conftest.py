"""Skips tests of what this torch can't do."""  # noqa: INP001 -- no package

import pytest
import torch

# What older versions of torch can't do. The mark -> whether this one can, and what it is.
ABLE = {
    "dynamic_convolution": (
        torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001 -- no public way to ask
            "onednn::qconv_pointwise.tensor", "Meta"
        ),
        "torch 2.9 has no shape function for the kernel of a dynamic convolution",
    ),
    "dynamic_variadic": (
        torch.__version__ >= "2.10",
        "torch 2.9 cannot run an exported module with a dynamic size in *args",
    ),
    "sizes_before_autograd": (
        torch.__version__ >= "2.12",
        "before torch 2.12 a plain torch.compile drops the sizes before its passes see the graph",
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """Know the marks."""
    for mark, (_, reason) in ABLE.items():
        config.addinivalue_line("markers", f"{mark}: {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this torch can't do; forms are marked by their names."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if any(form in item.name for form in ("[conv1d_dynamic", "[conv2d_dynamic")):
            marks.add("dynamic_convolution")
        for mark in marks & {*ABLE}:
            is_able, reason = ABLE[mark]
            if not is_able:
                item.add_marker(pytest.mark.skip(reason=reason))
