"""Reports made by hand: faster, slower, partial, inexact, tiny, and of 300 layers.

Tests are no package here; they read ``SAMPLES`` with `runpy`.
"""

import math
from dataclasses import replace

from versatil_core.host import Host
from versatil_core.latency import Judgement
from versatil_core.layer_report import ActivationRange, KernelRun, LayerAccuracy, LayerReport
from versatil_core.report_gates import gates_of, verdict_of
from versatil_core.report_result import (
    Accuracy,
    Environment,
    FirstResult,
    MetricResult,
    Report,
    Size,
    SpeedPoint,
    Timing,
    Verdict,
    VerdictCode,
)

HOSTILE = "head.<script>alert('1 & 2')</script>[bold]"
LONG = "encoder.layer.{}.attention.output.dense"
KERNEL = "brg_matmul:avx512_core_vnni"

ENVIRONMENT = Environment(
    host=Host("Some CPU with 2 sockets", "x86_64", 2, ("avx2", "avx512f"), ("avx", "avx2", "sse")),
    versions={"versatil-core": "0.2.0", "torch": "2.13.0+cpu", "torchao": "0.18.0"},
    backend="x86_inductor",
    options={"is_dynamic": False, "reduce_range": False, "saturation": "safe"},
    option_reasons={"saturation": "this CPU has no VNNI: sums of two products may saturate"},
    settings={"freezing": "True", "cpp_wrapper": "True"},
    variables={"OMP_NUM_THREADS": "2"},
    threads=2,
    load_average=0.25,
    calibration_batches=8,
    quantized_with={"torch": "2.13.0"},
    date="2026-12-01T12:00:00+00:00",
    command="versatil report model.pt2 --float models:factory --data batches.npz -o report.html",
)
ACCURACY = Accuracy(
    batches=6,
    samples=48,
    layer_batches=4,
    sqnr_db=31.42,
    reference_sqnr_db=31.47,
    kernels_sqnr_db=71.3,
    cosine=0.999641,
    max_error=0.1875,
    exact_ops=11,
    ops=11,
    metrics=(MetricResult("top1", 0.978, 0.975),),
)
SIZE = Size(
    97_800_000, 25_100_000, 97_500_000, 24_600_000, 41_000_000, 14_000_000, 530_000_000, 410_000_000
)
FIRST_RESULT = {
    "float": FirstResult(2.31, 0.412, 9.87, 12.9),
    "int8": FirstResult(2.35, 0.198, 8.12, 10.8),
}


def wave(index: int) -> float:
    """A number from 0 to 1 that looks like chance and isn't."""
    return abs(math.sin(12.9898 * index + 4.1) * 43758.5453) % 1


def layer(index: int, path: str, *, op: str = "linear", speedup: float = 2.0) -> LayerReport:
    """An int8 layer."""
    seconds = (0.15 + 1.3 * wave(index)) * 1e-3
    return LayerReport(
        module_path=path,
        op=op,
        node=f"{op}_{index}",
        input_shape=(8, 128, 384),
        weight_shape=(384, 384),
        output_shape=(8, 128, 384),
        is_int8=True,
        post_ops=("add", "relu") if index % 3 == 1 else (),
        output_dtype="uint8" if index % 3 == 0 else "float32",
        reason=None,
        may_saturate=index % 7 == 5,
        is_joined=index % 3 == 1,
        int8_run=KernelRun("onednn", KERNEL, "matmul", "u8:s8:f32", seconds),
        float_run=KernelRun("mkl", "gemm:mkl", "gemm", "f32:f32:f32", seconds * speedup),
        accuracy=LayerAccuracy(
            38 + 14 * wave(index + 7),
            31 + 9 * math.exp(-index / 20) + wave(index),
            True,
            "137.2 dB",
        ),
    )


def float_layer(path: str, op: str, reason: str) -> LayerReport:
    """A layer that stays float, and has no error."""
    made = layer(1, path, op=op)
    return replace(
        made,
        node=f"{op}_of_{path or 'nothing'}",
        is_int8=False,
        post_ops=(),
        output_dtype=None,
        reason=reason,
        may_saturate=False,
        is_joined=False,
        int8_run=None,
        float_run=None,
        accuracy=LayerAccuracy(math.inf, 44.0, None, ""),
    )


def activation(
    index: int, reader: str, *, low: float, high: float, **values: object
) -> ActivationRange:
    """Bell-shaped values from ``low`` to ``high`` on a grid from -2 to 3.1."""
    middle, width = (low + high) / 2, high - low
    made = ActivationRange(
        node=f"quantize_{index}",
        readers=(reader,),
        scale=0.02,
        zero_point=100,
        quant_min=0,
        quant_max=255,
        minimum=low,
        maximum=high,
        percentiles={
            "0.1": middle - 0.45 * width,
            "1": middle - 0.3 * width,
            "50": middle - 0.02 * width,
            "99": middle + 0.3 * width,
            "99.9": middle + 0.45 * width,
        },
        clipped_share=0.0,
        histogram=tuple(int(9000 * math.exp(-(((each - 22) / 7) ** 2))) for each in range(48)),
        channels=384,
    )
    return replace(made, **values)  # type: ignore[arg-type]


def speed_point(
    judgement: Judgement, speedup: float, *, threads: int = 2, batch: int = 8
) -> SpeedPoint:
    """A configuration whose int8 model takes 1.5 ms for each sample."""
    int8 = 0.0015 * batch

    def timing(seconds: float) -> Timing:
        return Timing(seconds, 0.97 * seconds, 1.05 * seconds)

    return SpeedPoint(
        threads=threads,
        batch=batch,
        input_shapes=((batch, 3, 224, 224),),
        rounds=30,
        float_eager=timing(int8 * speedup * 1.4),
        float_compiled=timing(int8 * speedup),
        int8=timing(int8),
        speedup=timing(speedup),
        speedup_eager=timing(speedup * 1.4),
        speedup_interval=(0.99 * speedup, 1.01 * speedup),
        judgement=judgement,
    )


LAYERS = (
    float_layer("embeddings.word_embeddings", "embedding", "no int8 kernel for embedding"),
    float_layer("embeddings.position_embeddings", "embedding", "no int8 kernel for embedding"),
    *(layer(index, LONG.format(index), speedup=1.4 + wave(index)) for index in range(9)),
    layer(9, "", op="conv2d"),
    layer(10, HOSTILE),
    float_layer("pooler.dense", "linear", "its module was excluded: quantize it, too"),
)
RANGES = (
    activation(0, LONG.format(0), low=-1.9, high=2.9),
    activation(1, LONG.format(1), low=-2.4, high=4.6, clipped_share=0.0123),
    activation(2, HOSTILE, low=0.0, high=0.6),
    activation(
        3,
        LONG.format(3),
        low=-2.0,
        high=30.0,
        clipped_share=0.004,
        outlier_channels=(3, 77),
        percentiles={"0.1": -1.1, "1": -0.7, "50": 0.1, "99": 1.2, "99.9": 8.0},
        histogram=(40, 900, 7000, 3000, 60, *([0] * 30), 3, 2, *([0] * 10), 1),
    ),
    activation(4, LONG.format(4), low=-1.2, high=2.2, readers=("a.query", "a.key", "a.value")),
)


def judged(report: Report) -> Report:
    """The same with the verdict that its numbers give."""
    return replace(report, verdict=verdict_of(report))


NOTHING_YET = Verdict(VerdictCode.INCOMPLETE, "")
FASTER = judged(
    Report(
        title="model.pt2",
        verdict=NOTHING_YET,
        environment=ENVIRONMENT,
        layers=LAYERS,
        notes=("1 layer may saturate on this CPU, see <b>saturation</b> [sic]",),
        accuracy=ACCURACY,
        ranges=RANGES,
        speed=(
            speed_point(Judgement.FASTER, 2.1),
            speed_point(Judgement.FASTER, 1.7, threads=1, batch=1),
        ),
        first_result=FIRST_RESULT,
        size=SIZE,
    )
)
FASTER = replace(
    FASTER, gates=gates_of(FASTER, min_speedup=1.5, min_sqnr_db=40.0, require_int8=True)
)
SLOWER = judged(
    replace(
        FASTER,
        layers=tuple(
            layer(index, LONG.format(index), speedup=0.7 if index in {3, 7, 11, 12} else 1.2)
            for index in range(40)
        ),
        speed=(
            speed_point(Judgement.SLOWER, 0.8, batch=32),
            speed_point(Judgement.TOO_NOISY, 1.1, batch=64),
            speed_point(Judgement.SAME_SPEED, 1.01, threads=1, batch=1),
        ),
        gates=(),
    )
)
INEXACT = judged(
    replace(
        FASTER,
        layers=tuple(
            replace(
                each, accuracy=LayerAccuracy(-math.inf, math.nan, False, "up to 26 steps, in 3 %")
            )
            if index == 4
            else each
            for index, each in enumerate(LAYERS)
        ),
        accuracy=replace(ACCURACY, exact_ops=10, sqnr_db=17.2),
    )
)
PARTIAL = judged(
    replace(
        FASTER,
        layers=tuple(replace(each, int8_run=None, float_run=None) for each in LAYERS),
        speed=(),
        first_result={},
        size=None,
        gates=(),
        unfinished=("kernels", "speed"),
    )
)
TINY = judged(replace(FASTER, layers=LAYERS[2:5], ranges=RANGES[:2], notes=(), gates=()))
BARE = judged(
    Report(
        title="bare",
        verdict=NOTHING_YET,
        environment=replace(
            ENVIRONMENT, load_average=None, quantized_with={}, settings={}, variables={}, options={}
        ),
        layers=tuple(
            replace(each, int8_run=None, float_run=None, accuracy=None) for each in LAYERS[2:3]
        ),
    )
)
MANY = judged(
    replace(
        FASTER,
        layers=tuple(
            replace(
                layer(index, LONG.format(index), speedup=0.8 + 2 * wave(index + 3)),
                is_joined=index % 3 == 1 and index % 25 != 1,
            )
            if index % 25
            else float_layer(LONG.format(index), "linear", "its activation has no fixed scale")
            for index in range(300)
        ),
        ranges=tuple(
            activation(
                index,
                LONG.format(index),
                low=-1.9 - wave(index),
                high=1.2 + 2.5 * wave(index + 1),
                clipped_share=0.002 if index % 20 == 7 else 0.0,
            )
            for index in range(300)
        ),
        speed=(speed_point(Judgement.FASTER, 2.1, batch=256),),
        gates=(),
    )
)
SAMPLES: dict[str, Report] = {
    "faster": FASTER,
    "slower": SLOWER,
    "inexact": INEXACT,
    "partial": PARTIAL,
    "tiny": TINY,
    "bare": BARE,
    "many": MANY,
}
