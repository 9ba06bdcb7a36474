"""Counts the int8 kernels in the code that Inductor generates."""

import re

_COMMENT = re.compile(r"^\s*(#|//).*$", re.MULTILINE)
# In the code for Python and for C++: onednn.qlinear_pointwise.default(, __qlinear_pointwise_tensor(
_INT8_CALL = re.compile(r"\b(onednn\.|aoti_torch_cpu__)q(linear|conv)\w*_pointwise[\w.]*\(")


def int8_calls(code: str) -> int:
    """Count the calls of oneDNN's int8 kernels in what Inductor generated.

    An operator that is not bound to a kernel, such as ``versatil.qlinear``, is no such call.

    Example:
        >>> int8_calls("buf1 = torch.ops.onednn.qlinear_pointwise.default(buf0, scale)")
        1
    """
    return len(_INT8_CALL.findall(_COMMENT.sub("", code)))
