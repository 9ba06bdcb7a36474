"""Which logged kernel ran which layer."""

from dataclasses import replace

import pytest

from versatil_core.kernel_log import LoggedKernel, Problem
from versatil_core.layer_kernels import kernels_of_layers, problems_of
from versatil_core.layer_report import LayerReport

Shape = tuple[int, ...]


def layer(
    op: str, source: Shape, weight: Shape, result: Shape, *, is_int8: bool = True
) -> LayerReport:
    return LayerReport("", op, "node", source, weight, result, is_int8, (), None, None)


def kernel(problem: Problem, name: str, *, int8: bool = True, seconds: float = 1.0) -> LoggedKernel:
    primitive = "matmul" if problem[0] == "gemm" else "convolution"
    dtypes = "u8:s8:f32" if int8 else "f32:f32:f32"
    return LoggedKernel("onednn", primitive, name, dtypes, problem, seconds)


LINEAR = layer("linear", (2, 3, 8), (4, 8), (2, 3, 4))
GEMM: Problem = ("gemm", (1, 6, 8, 4))
CONV = layer("conv2d", (2, 1, 8, 8), (16, 1, 3, 3), (2, 16, 6, 6))
UPSAMPLED = layer("conv_transpose2d", (2, 16, 5, 4), (16, 4, 3, 3), (2, 8, 9, 7), is_int8=False)
CONV_PROBLEM: Problem = ("conv", (2, 1, 16, 6, 6))


def names(
    layers: list[LayerReport], *run: LoggedKernel, is_float: bool = False
) -> list[str | None]:
    found = kernels_of_layers(layers, [run], is_float=is_float)
    return [None if each is None else each.implementation for each in found]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (LINEAR, [GEMM]),
        (layer("matmul", (2, 3, 4, 5), (2, 3, 5, 6), (2, 3, 4, 6)), [("gemm", (6, 4, 5, 6))]),
        (layer("matmul", (2, 4, 5), (5, 6), (2, 4, 6)), [("gemm", (1, 8, 5, 6))]),
        (layer("addmm", (4, 5), (5, 6), (4, 6)), [("gemm", (1, 4, 5, 6))]),
        (layer("baddbmm", (2, 4, 5), (2, 5, 6), (2, 4, 6)), [("gemm", (2, 4, 5, 6))]),
        (UPSAMPLED, [("deconv", (2, 16, 8, 9, 7))]),
        (CONV, [CONV_PROBLEM, ("gemm", (1, 72, 9, 16))]),
        (layer("conv1d", (2, 4, 9), (8, 4, 3), (2, 8, 7)), [("conv", (2, 4, 8, 7))]),
        (layer("conv2d", (2, 4, 1, 9), (8, 4, 1, 3), (2, 8, 1, 7)), [("conv", (2, 4, 8, 7))]),
        (layer("embedding", (2, 3), (10, 4), (2, 3, 4)), []),
        (layer("lstm", (2,), (2,), (2,)), []),
    ],
)
def test_problems(of: LayerReport, expected: list[Problem]) -> None:
    found = problems_of(of)

    assert [problem for problem in expected if problem not in found] == []
    assert bool(found) == bool(expected)


def test_equal_layers_take_equal_kernels_in_order() -> None:
    run = kernel(GEMM, "first"), kernel(CONV_PROBLEM, "conv"), kernel(GEMM, "second")
    assert names([LINEAR, CONV, LINEAR], *run) == ["first", "conv", "second"]


def test_a_kernel_serves_one_layer() -> None:
    assert names([LINEAR, LINEAR], kernel(GEMM, "only")) == ["only", None]


def test_the_order_of_kernels_of_other_layers_does_not_matter() -> None:
    assert names([LINEAR, CONV], kernel(CONV_PROBLEM, "c"), kernel(GEMM, "g")) == ["g", "c"]


def test_int8_kernels_are_for_int8_layers() -> None:
    """Where a float layer computes the same as an int8 one, each gets the kernel of its kind."""
    in_float = replace(LINEAR, is_int8=False)
    run = kernel(GEMM, "int8"), kernel(GEMM, "float", int8=False)

    assert names([in_float, LINEAR], *run) == ["float", "int8"]
    assert names([LINEAR, LINEAR], *run) == ["int8", "float"]  # to be noticed
    assert names([LINEAR], kernel(GEMM, "float", int8=False), is_float=True) == ["float"]


def test_convolutions_that_are_made_with_other_sizes() -> None:
    other: Problem = ("conv", (2, 2, 16, 6, 6))  # a second channel of zeros

    assert names([CONV], kernel(other, "grey")) == ["grey"]
    # With one more of them nobody knows which is which.
    assert names([CONV], kernel(other, "grey"), kernel(other, "more")) == [None]
    # Nor does a linear take it.
    assert names([LINEAR], kernel(other, "grey")) == [None]


def test_batches_of_products_are_matched_in_order() -> None:
    """MKL doesn't log their sizes."""
    scores = layer("matmul", (2, 3, 4, 5), (2, 3, 5, 6), (2, 3, 4, 6), is_int8=False)
    mixed = replace(scores, weight_shape=(2, 3, 5, 7), output_shape=(2, 3, 4, 7))
    batches = [
        LoggedKernel("mkl", "SGEMM_BATCH", name, "f32:f32:f32", None, 1.0) for name in ("a", "b")
    ]

    assert names([scores, LINEAR, mixed], *batches, kernel(GEMM, "g")) == ["a", "g", "b"]
    # With one less nobody knows which it is.
    assert names([scores, LINEAR, mixed], batches[0], kernel(GEMM, "g")) == [None, "g", None]


def test_an_upsampling_takes_no_convolution() -> None:
    same: Problem = ("conv", (2, 16, 8, 9, 7))

    assert names([UPSAMPLED], kernel(same, "convolution", int8=False)) == [None]
    assert names([UPSAMPLED], kernel(("deconv", same[1]), "deconvolution", int8=False)) == [
        "deconvolution"
    ]


def test_the_fastest_run_counts() -> None:
    runs = [[kernel(GEMM, "k", seconds=seconds)] for seconds in (3.0, 1.0, 2.0)]
    [found] = kernels_of_layers([LINEAR], runs, is_float=False)

    assert found is not None
    assert found.seconds == 1.0
    assert (found.library, found.primitive, found.dtypes) == ("onednn", "matmul", "u8:s8:f32")
    assert found.is_int8


def test_without_runs_nothing_is_known() -> None:
    assert kernels_of_layers([LINEAR], [], is_float=False) == (None,)
