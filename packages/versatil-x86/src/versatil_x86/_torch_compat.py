"""Every private torch API that this package touches.

Checked on torch 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0.
"""

import torch
import torch._meta_registrations  # torch defines the shapes of its own kernels here


def has_dynamic_conv_kernel() -> bool:
    """Whether Inductor can compile an int8 convolution whose activation scale is a tensor.

    The kernel exists in all versions; 2.9 has no shape function for it, and cannot trace it.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001 -- no public way to ask
        "onednn::qconv_pointwise.tensor", "Meta"
    )
