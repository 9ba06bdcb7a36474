"""A report with real kernels: what oneDNN says that it ran is what the audit promised."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from versatil_core import Report, quantize, report
from versatil_core.host import read_host
from versatil_x86 import X86InductorBackend


class Model(nn.Module):
    """Layers that oneDNN gets under other sizes (grey images), by other kernels, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.grey = nn.Conv2d(1, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.upsampled = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.head = nn.Linear(4 * 16 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.depthwise(torch.relu(self.grey(images))))
        return self.head(self.upsampled(hidden).flatten(1))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Report:
    torch.manual_seed(0)
    model, images = Model().eval(), torch.rand(4, 1, 8, 8)
    backend = X86InductorBackend(saturation="safe")
    reference = quantize(model, images, backend, [images])
    before = {*Path(tmp_path_factory.getbasetemp().anchor, "tmp").glob("versatil_*")}
    threads = threading.active_count()
    result = report(model, reference, backend, [images], parts=["kernels"])
    assert threading.active_count() == threads
    assert {*Path(tmp_path_factory.getbasetemp().anchor, "tmp").glob("versatil_*")} <= before
    return result


def test_each_layer_has_the_kernel_that_the_audit_promises(found: Report) -> None:
    grey, depthwise, upsampled, head = found.layers

    for layer in (grey, depthwise, head):
        assert layer.int8_run is not None, layer
        assert layer.float_run is not None, layer
        assert layer.is_int8
        assert layer.int8_run.is_int8
        assert layer.int8_run.library == "onednn"
        assert layer.float_run.dtypes == "f32:f32:f32"
        assert layer.speedup is not None
        assert layer.speedup > 0
    assert grey.int8_run is not None
    assert head.int8_run is not None
    assert grey.int8_run.primitive == "convolution"
    assert head.int8_run.primitive == "matmul"
    # Where the CPU has VNNI, its kernels are called by its name.
    if "avx512_vnni" in read_host().features:
        assert "vnni" in head.int8_run.implementation
    assert upsampled.reason is not None


def test_no_kernel_is_missed(found: Report) -> None:
    upsampled = found.layers[2]
    for run in (upsampled.int8_run, upsampled.float_run):
        assert run is not None
        assert (run.primitive, run.dtypes) == ("deconvolution", "f32:f32:f32")
    told = " ".join(found.notes)
    assert "No kernel was seen" not in told
    assert "unknown" not in told
    assert "report this" not in told


def test_int8_hangs_together(found: Report) -> None:
    assert [layer.is_joined for layer in found.layers] == [False, True, False, False]
    assert found.layers[0].output_dtype == "uint8"


def test_first_results_and_sizes(found: Report) -> None:
    assert found.first_result.keys() == {"float", "int8"}
    for result in found.first_result.values():
        parts = result.import_seconds + result.load_seconds + result.compile_seconds
        assert 0 < parts <= result.total_seconds
    size = found.size
    assert size is not None
    assert size.int8_weights < size.float_weights
    assert size.int8_file > size.int8_weights
    assert size.float_file > size.float_weights
    for call, process in (
        (size.float_call, size.float_process),
        (size.int8_call, size.int8_process),
    ):
        assert call is not None
        assert process is not None
        assert 0 <= call < process
