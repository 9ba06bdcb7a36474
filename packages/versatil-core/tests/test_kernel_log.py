"""What oneDNN and MKL log, line by line as they wrote it."""

import pytest

from versatil_core.kernel_log import LoggedKernel, Problem, read_log

CONVOLUTION = (
    "onednn_verbose,v1,primitive,exec,cpu,convolution,brg_conv_fwd:avx512_core_vnni,forward_inference,"
    "src:u8::blocked:acdb::f0 wei:s8:ap:blocked:Adcb16a::f8:zpm1 bia:f32:a:blocked:a::f0 "
    "dst:u8::blocked:acdb::f0,attr-scratchpad:user attr-scales:src0:0:f32+dst:0:f32+wei:1:f32 "
    "attr-zero-points:src0:0:s32+dst:0:s32,alg:convolution_direct,"
    "mb4_ic1oc8_ih8oh8kh3sh1dh0ph1_iw8ow8kw3sw1dw0pw1,10.959"
)
MATMUL = (
    "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_vnni,undef,src:u8:a:blocked:ab::f0 "
    "wei:s8:p:blocked:BA16a64b4a::f8:zpm2 bia:f32:a:blocked:ab::f0_mask2 dst:f32:a:blocked:ab::f0,"
    "attr-scratchpad:user attr-scales:src0:0:f32+wei:2:f32,,4x512:512x16,0.0158691"
)
# oneDNN before 3.5, as the wheels of older torch have it.
OLD_MATMUL = (
    "onednn_verbose,exec,cpu,matmul,gemm:jit,undef,src_s8::blocked:ab::f0 wei_s8::blocked:ab::f0 "
    "dst_f32::blocked:ab::f0,attr-scratchpad:user,,2x3x4:2x4x5:2x3x5,0.5"
)
MKL = (
    "MKL_VERBOSE SGEMM_COMPUTE(P,N,16,4,512,0x7efe84742040,512,0x55f5dbded880,512,0x7ffdfb6e5f30,"
    "0x55f5dbc4c700,16) 34.58us CNR:OFF Dyn:1 FastMM:1 TID:0  NThr:2"
)


def only(line: str) -> LoggedKernel:
    [kernel] = read_log([line])
    return kernel


def test_convolution() -> None:
    assert only(CONVOLUTION) == LoggedKernel(
        library="onednn",
        primitive="convolution",
        implementation="brg_conv_fwd:avx512_core_vnni",
        dtypes="u8:s8:u8",
        problem=("conv", (4, 1, 8, 8, 8)),
        seconds=0.010959,
    )


def test_matmul() -> None:
    kernel = only(MATMUL)

    assert kernel.implementation == "brg_matmul:avx512_core_vnni"
    assert kernel.dtypes == "u8:s8:f32"
    assert kernel.problem == ("gemm", (1, 4, 512, 16))
    assert kernel.is_int8


def test_the_older_form() -> None:
    kernel = only(OLD_MATMUL)

    assert kernel.dtypes == "s8:s8:f32"
    assert kernel.problem == ("gemm", (2, 3, 4, 5))
    assert kernel.seconds == pytest.approx(0.0005)


def test_mkl() -> None:
    assert only(MKL) == LoggedKernel(
        library="mkl",
        primitive="SGEMM_COMPUTE",
        implementation="sgemm_compute",
        dtypes="f32:f32:f32",
        problem=("gemm", (1, 4, 512, 16)),
        seconds=34.58 * 1e-6,
    )
    assert not only(MKL).is_int8


def test_a_batch_of_mkl_tells_no_sizes() -> None:
    line = (
        "MKL_VERBOSE SGEMM_BATCH(N,N,0x7fffc105ab38,0x7fffc105ab34,0x7fffc105ab30,0x7fffc105ab2c,"
        "0x5565223c8240,0x7fffc105ab3c) 1.47ms CNR:OFF Dyn:1 FastMM:1 TID:0  NThr:2"
    )
    kernel = only(line)

    assert (kernel.library, kernel.primitive, kernel.problem) == ("mkl", "SGEMM_BATCH", None)
    assert kernel.seconds == pytest.approx(1.47e-3)


@pytest.mark.parametrize("line", [CONVOLUTION, MATMUL])
def test_lines_with_the_time_of_day(line: str) -> None:
    """ONEDNN_VERBOSE_TIMESTAMP=1 in the environment puts it before what kind of line it is."""
    timed = line.replace("v1,primitive", "v1,1796125581007.968994,primitive")

    assert timed != line
    assert only(timed) == only(line)
    assert only(OLD_MATMUL.replace("verbose,", "verbose,1796125581007.968994,")) == only(OLD_MATMUL)


@pytest.mark.parametrize(("text", "seconds"), [("1.5ms", 1.5e-3), ("2s", 2.0), ("3ns", 3e-9)])
def test_units_of_mkl(text: str, seconds: float) -> None:
    assert only(MKL.replace("34.58us", text)).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("primitive", "problem", "expected"),
    [
        ("inner_product", "mb32ic384oc1536", ("gemm", (1, 32, 384, 1536))),
        ("inner_product", "mb2ic8ih4iw4oc10", ("gemm", (1, 2, 128, 10))),
        ("convolution", "g8mb4_ic8oc8_ih8oh8kh3_iw8ow7kw3", ("conv", (4, 8, 8, 8, 7))),
        ("convolution", "mb4_ic8oc8_iw8ow8kw3", ("conv", (4, 8, 8, 8))),
        ("convolution", "mb4_ic8oc8_id4od2_ih8oh1_iw8ow8", ("conv", (4, 8, 8, 2, 8))),
        ("deconvolution", "g2mb2_ic16oc8_ih5oh9kh3_iw5ow7kw3", ("deconv", (2, 16, 8, 9, 7))),
        ("deconvolution", "mb2_ic6oc4_ih1oh1kh1_iw9ow19kw3", ("deconv", (2, 6, 4, 19))),
        ("reorder", "4x512", None),
        ("matmul", "nonsense", None),
        ("matmul", "4:4", None),
    ],
)
def test_problems(primitive: str, problem: str, expected: Problem | None) -> None:
    line = MATMUL.replace(",matmul,", f",{primitive},").replace("4x512:512x16", problem)
    assert only(line).problem == expected


@pytest.mark.parametrize(
    ("dtypes", "is_int8"),
    [
        ("u8:s8:f32", True),
        ("s8:s8:s8", True),
        ("f32:f32:f32", False),
        ("f32:s8:f32", False),
        ("u8:f32:u8", False),
        ("", False),
    ],
)
def test_int8_is_where_integers_are_multiplied(dtypes: str, is_int8: bool) -> None:
    assert LoggedKernel("onednn", "matmul", "some", dtypes, None, 1.0).is_int8 is is_int8


@pytest.mark.parametrize(
    "line",
    [
        "",
        "onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71049cd69a3df32adcccb623b12cd7baa22)",
        "onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,exec_time",
        "onednn_verbose,v1,primitive,create:cache_miss,cpu,matmul,jit,undef,src:u8:a,,,4x512:512x16,1",
        "MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture",
        "MKL_VERBOSE SDOT(4,0x5f,1,0x5f,1) 1.00us CNR:OFF",
        MATMUL[:80],
    ],
)
def test_other_lines_are_no_kernels(line: str) -> None:
    assert [*read_log([line])] == []
