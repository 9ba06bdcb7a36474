"""Reads what oneDNN and MKL log of each kernel that they run.

oneDNN's lines are described in its documentation, "Verbose mode"; MKL's in its developer guide, "Using
MKL_VERBOSE". Checked on the lines of oneDNN 3.7 to 3.12 and of MKL 2024.0.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MARKER = "versatil_run"
"""The line that a traced process puts between two runs."""
_ONEDNN = re.compile(
    # ONEDNN_VERBOSE_TIMESTAMP puts a time before what kind of line it is.
    r"onednn_verbose,(?:v\d+,)?(?:[0-9.]+,)?(?:primitive,)?exec,\w+,"
    r"(?P<primitive>\w+),(?P<implementation>[^,]+),[^,]*,(?P<memory>[^,]*),"
    r"[^,]*,[^,]*,(?P<problem>[^,]*),(?P<time>[0-9.e+-]+)"
)
_DTYPE = re.compile(r"\b(src|wei|dst)(?:_\w+)?[:_](u8|s8|s32|f32|bf16|f16|f64)\b")
_MKL = re.compile(
    r"MKL_VERBOSE (?P<name>(?P<type>[SD])GEMM\w*)\(\w,\w,"
    r"(?:(?P<m>\d+),(?P<n>\d+),(?P<k>\d+),)?.*?\) (?P<time>[0-9.]+)(?P<unit>ns|us|ms|s)\b"
)
_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_CONVOLUTIONS = {"convolution": "conv", "deconvolution": "deconv"}
_SIZES = re.compile(r"([a-z]+)(\d+)")

Problem = tuple[str, tuple[int, ...]]
"""``("gemm", (batch, rows, inner, columns))``, or ``("conv", (batch, input channels, output
channels, *output sizes that are not 1))`` or ``"deconv"`` likewise: what a kernel and a layer can be
compared by."""


@dataclass(frozen=True)
class LoggedKernel:
    """One call of a kernel.

    Attributes:
        library: ``"onednn"`` or ``"mkl"``.
        primitive: Such as ``"matmul"``, ``"convolution"``, ``"reorder"`` or ``"SGEMM"``.
        implementation: Such as ``"brg_matmul:avx512_core_vnni"``.
        dtypes: Of source, weights and result, such as ``"u8:s8:f32"``.
        problem: What it computed; None if it is neither a product nor a convolution, and for
            MKL's batches of products, of which it logs no size.
        seconds: How long it took.
    """

    library: str
    primitive: str
    implementation: str
    dtypes: str
    problem: Problem | None
    seconds: float

    @property
    def is_int8(self) -> bool:
        """Whether it multiplies 8-bit integers."""
        source, weights, *_ = *self.dtypes.split(":"), "", ""
        return source in {"u8", "s8"} and weights in {"u8", "s8"}


def read_log(lines: Iterable[str]) -> Iterator[LoggedKernel]:
    """Find the calls of kernels among other lines, in order.

    Example:
        >>> line = "MKL_VERBOSE SGEMM(T,N,16,4,512,0x7f,0x5f,16,0x5f,4,0x7f,0x5f,4) 2.50us CNR:OFF"
        >>> [kernel] = read_log(["noise", line])
        >>> kernel.problem
        ('gemm', (1, 4, 512, 16))
    """
    for line in lines:
        if (match := _ONEDNN.search(line)) is not None:
            found = dict(_DTYPE.findall(match["memory"]))
            yield LoggedKernel(
                library="onednn",
                primitive=match["primitive"],
                implementation=match["implementation"],
                dtypes=":".join(found[name] for name in ("src", "wei", "dst") if name in found),
                problem=_problem(match["primitive"], match["problem"]),
                seconds=float(match["time"]) * 1e-3,
            )
        elif (match := _MKL.search(line)) is not None:
            dtype = "f32" if match["type"] == "S" else "f64"
            yield LoggedKernel(
                library="mkl",
                primitive=match["name"],
                implementation=match["name"].lower(),
                dtypes=f"{dtype}:{dtype}:{dtype}",
                problem=_mkl_problem(match),
                seconds=float(match["time"]) * _UNITS[match["unit"]],
            )


def _mkl_problem(match: re.Match[str]) -> Problem | None:
    """MKL is told of columns: the transpose of what torch multiplies. A batch is told by addresses."""
    if match["m"] is None or match["name"].endswith("BATCH"):
        return None
    return "gemm", (1, int(match["n"]), int(match["k"]), int(match["m"]))


def _problem(primitive: str, text: str) -> Problem | None:
    if primitive == "matmul":
        return _matmul(text)
    sizes = {name: int(size) for name, size in _SIZES.findall(text)}
    if primitive == "inner_product" and {"mb", "ic", "oc"} <= sizes.keys():
        inner = math.prod(sizes.get(name, 1) for name in ("ic", "id", "ih", "iw"))
        return "gemm", (1, sizes["mb"], inner, sizes["oc"])
    if primitive in _CONVOLUTIONS and {"mb", "ic", "oc"} <= sizes.keys():
        spatial = [sizes[name] for name in ("od", "oh", "ow") if sizes.get(name, 1) != 1]
        return _CONVOLUTIONS[primitive], (sizes["mb"], sizes["ic"], sizes["oc"], *spatial)
    return None


def _matmul(text: str) -> Problem | None:
    """Read ``8x4x512:8x512x16``, which an older oneDNN ends with the sizes of the result."""
    try:
        source, weights = ([*map(int, part.split("x"))] for part in text.split(":")[:2])
    except ValueError:
        return None
    if len(source) < 2 or len(weights) < 2:
        return None
    *outer, rows, inner = source
    return "gemm", (math.prod(outer), rows, inner, weights[-1])
