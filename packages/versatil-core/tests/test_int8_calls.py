"""The calls of int8 kernels in generated code are counted, and nothing that only looks alike."""

import pytest

from versatil_core.int8_calls import int8_calls


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("buf1 = torch.ops.onednn.qlinear_pointwise.default(buf0, 0.1, 3)", 1),
        ("buf1 = torch.ops.onednn.qconv2d_pointwise.binary(buf0, 0.1, 3)", 1),
        ("CHECK(aoti_torch_cpu__qlinear_pointwise_tensor(buf0, x_scale));", 1),
        ("    CHECK(aoti_torch_cpu__qconv_pointwise_tensor(buf0));\n" * 2, 2),
        ("CHECK(aoti_torch_cpu__qconv2d_pointwise_binary_tensor(buf0));", 1),
        ("buf1 = torch.ops.versatil.qlinear.default(buf0, 0.1, 3)", 0),
        ("buf1 = torch.ops.onednn.qconv_prepack.default(buf0, 0.1, 3)", 0),
        ('assert_size(buf1, "torch.ops.onednn.qlinear_pointwise.default");', 0),
        ("    # Source Nodes: [qlinear] torch.ops.onednn.qlinear_pointwise.default(x)", 0),
        ("    // Source Nodes: [qconv] aoti_torch_cpu__qconv_pointwise_tensor(x)", 0),
        ("cpp_fused_mean_qlinear_round_1(buf0);", 0),
    ],
)
def test_int8_calls_are_counted(code: str, count: int) -> None:
    assert int8_calls(code) == count
