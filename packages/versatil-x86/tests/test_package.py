"""A package runs the int8 kernels of its reference in any process, and nothing compiles there."""

import copy
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule
from typer.testing import CliRunner

from versatil_core import (
    InputError,
    PackagedModel,
    PackagingError,
    UnsupportedHostError,
    load_package,
    lower,
    package,
    quantize,
    read_manifest,
    save,
    sqnr_db,
)
from versatil_core.command import app
from versatil_core.conformance_process import changed, process_state
from versatil_core.model_file import read_model_file
from versatil_x86 import X86InductorBackend

# What torch's own compiler uses; seen by whoever imports it first.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)

BACKEND = X86InductorBackend(reduce_range=True)  # exact on every CPU
DYNAMIC = X86InductorBackend(is_dynamic=True, reduce_range=True)


class Network(nn.Module):
    """A residual add, tied weights, inputs by name, a constant result, and an input that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.again = (nn.Conv2d(size, 8, 3, padding=1) for size in (3, 8))
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.second.weight = self.first.weight
        self.register_buffer("names", torch.arange(5.0))

    def forward(
        self, image: Tensor, *, more: dict[str, Tensor], scale: float = 2.0
    ) -> dict[str, Any]:
        h = self.conv(image.add_(0.1)).relu()
        h = (self.again(h) + h).relu().mean((2, 3))
        h = self.second(self.first(h).relu())
        return {"y": self.head(h) * scale + more["bias"], "names": self.names}


def inputs(batch: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(batch)
    image = torch.randn(batch, 3, 8, 8, generator=random)
    return {
        "image": image,
        "more": {"bias": torch.randn(batch, 5, generator=random)},
        "scale": 3.0,
    }


@dataclass(frozen=True)
class Packaged:
    """A reference, its file, and what packaging changed in the process."""

    reference: GraphModule
    path: Path
    changed: list[str]


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Packaged, Packaged]:
    """Package two models in two threads: one with everything, one that is quantized dynamically."""
    torch.manual_seed(0)
    sizes = {"image": {0: Dim("batch", max=64)}, "more": {"bias": {0: Dim("batch", max=64)}}}
    network = quantize(
        Network().eval(), inputs(3), BACKEND, [inputs(16)], dynamic_shapes={**sizes, "scale": None}
    )
    x = torch.randn(4, 16)
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    dynamic = quantize(layers.eval(), x, DYNAMIC)
    folder = tmp_path_factory.mktemp("packages")
    paths = folder / "network.pt2", folder / "dynamic.pt2"
    before = process_state(with_patterns=False)
    with ThreadPoolExecutor(2) as pool:
        # An example of one image, though sizes of 1 are special to torch.
        first = pool.submit(package, network, inputs(1), BACKEND, paths[0])
        second = pool.submit(package, dynamic, x, DYNAMIC, paths[1])
        first.result(), second.result()
    differing = changed(before, process_state(with_patterns=False))
    return (
        Packaged(network, paths[0], differing),
        Packaged(dynamic, paths[1], differing),
    )


@pytest.fixture(scope="session")
def network(both: tuple[Packaged, Packaged]) -> Packaged:
    return both[0]


@pytest.fixture(scope="session")
def dynamic(both: tuple[Packaged, Packaged]) -> Packaged:
    return both[1]


@pytest.fixture(scope="session")
def model(network: Packaged) -> PackagedModel:
    return load_package(network.path)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_it_gives_what_lowered_gives(network: Packaged, model: PackagedModel, batch: int) -> None:
    expected = lower(network.reference, BACKEND)(**inputs(batch))

    result = model(**inputs(batch))

    assert list(result) == ["y", "names"]
    assert result["y"].shape == (batch, 5)
    assert sqnr_db(result["y"], expected["y"]) > 60
    assert sqnr_db(result["y"], network.reference(**inputs(batch))["y"]) > 60
    assert torch.equal(result["names"], expected["names"])


def test_quantized_dynamically(dynamic: Packaged) -> None:
    x = torch.randn(4, 16)

    result = load_package(dynamic.path)(x)

    assert sqnr_db(result, lower(dynamic.reference, DYNAMIC)(x)) > 60


def test_the_command_packages_a_portable_file(dynamic: Packaged, tmp_path: Path) -> None:
    save(dynamic.reference, tmp_path / "portable.pt2")
    output, x = tmp_path / "package.pt2", torch.randn(4, 16)

    result = CliRunner().invoke(app, ["package", str(tmp_path / "portable.pt2"), "-o", str(output)])

    assert result.exit_code == 0, result.output
    assert "Verified: 2 int8 kernels for 2 of 2 layers" in result.stdout
    assert torch.equal(load_package(output)(x), load_package(dynamic.path)(x))


def test_the_manifest_says_what_was_verified(network: Packaged, dynamic: Packaged) -> None:
    manifest = read_manifest(network.path)

    assert manifest.kind == "package"
    assert manifest.package is not None
    assert manifest.package.int8_kernel_calls == manifest.package.audit["int8_count"] == 5
    assert manifest.package.backend.backend == "x86_inductor"
    assert manifest.package.settings["freezing"] == "True"
    assert {*manifest.package.cpu_features} == {*BACKEND.cpu_features}
    assert read_manifest(dynamic.path).package.int8_kernel_calls == 2  # type: ignore[union-attr]


def test_it_holds_no_pickle_and_no_command(network: Packaged) -> None:
    """Commands name folders of the machine that it was made on."""
    members = read_model_file(network.path).members

    assert sorted(name.rpartition("/")[2] for name in members) == [
        *("archive_format", "archive_version", "byteorder", "model.kernel.cpp"),
        *("model.kernel_metadata.json", "model.wrapper.cpp", "model.wrapper.so"),
        *("model.wrapper_metadata.json", "version"),
    ]
    code = [data for name, data in members.items() if name.endswith(".cpp")]
    assert b"qlinear_pointwise" in b"".join(code)
    assert b"-march" not in b"".join(code)


def test_packaging_changes_nothing(network: Packaged) -> None:
    assert network.changed == []


def test_input_tensors_are_not_written_to(model: PackagedModel) -> None:
    given, kept = inputs(3), inputs(3)

    first, second = model(**given), model(**given)

    assert torch.equal(given["image"], kept["image"])
    assert torch.equal(given["more"]["bias"], kept["more"]["bias"])
    assert torch.equal(first["y"], second["y"])


def test_any_layout_and_inputs_with_gradients(model: PackagedModel) -> None:
    expected, given = model(**inputs(3))["y"], inputs(3)
    given["image"] = given["image"].to(memory_format=torch.channels_last).requires_grad_()
    given["more"]["bias"] = given["more"]["bias"].t().contiguous().t()

    result = model(scale=given["scale"], more=given["more"], image=given["image"])

    assert torch.equal(result["y"], expected)
    assert not result["y"].requires_grad


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image": torch.randn(65, 3, 8, 8)}, r"must be in 1 … 64"),
        ({"image": torch.randn(3, 3, 8, 9)}, r"expected the shape \(.*, 3, 8, 8\)"),
        ({"image": torch.randn(2, 3, 8, 8)}, "must be equal"),
        ({"image": torch.randn(3, 3, 8, 8).double()}, r"convert it with .to\(torch.float32\)"),
        ({"scale": 2.0}, r"the constant 3.0"),
        ({"more": {}}, "nested as when it was quantized"),
        ({"extra": torch.ones(1)}, "by name image, more, scale"),
    ],
)
def test_inputs_that_do_not_fit(model: PackagedModel, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        model(**{**inputs(3), **change})


def test_a_result_is_the_callers_own(model: PackagedModel) -> None:
    """Also one that is a constant of the code, where writing would end the process."""
    model(**inputs(3))["names"].add_(1)

    assert model(**inputs(3))["names"].tolist() == [0, 1, 2, 3, 4]


def test_a_deep_copy_gives_the_same(model: PackagedModel) -> None:
    copied = copy.deepcopy(nn.Sequential(model))[0].train().eval()

    assert torch.equal(copied(**inputs(3))["y"], model(**inputs(3))["y"])


FRESH = """
import os, sys, torch
from versatil_core import load_package
model = load_package(sys.argv[1])
batch, expected = torch.load(sys.argv[2])
assert torch.equal(model(**batch)["y"], expected)
for name in ("torch._inductor.compile_fx", "torch._dynamo.convert_frame", "torchao"):
    assert name not in sys.modules, name
"""


def test_a_fresh_process_compiles_nothing(
    network: Packaged, model: PackagedModel, tmp_path: Path
) -> None:
    batch, cache = inputs(5), tmp_path / "cache"
    cache.mkdir()
    torch.save((batch, model(**batch)["y"]), tmp_path / "values.pt")

    result = subprocess.run(
        [sys.executable, "-c", FRESH, network.path, tmp_path / "values.pt"],
        env=os.environ | {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert list(cache.iterdir()) == []


def test_eight_threads_get_the_results_of_one(model: PackagedModel) -> None:
    sizes = [1, 3, 17, 64] * 60
    expected = {size: model(**inputs(size))["y"] for size in sizes[:4]}

    with ThreadPoolExecutor(8) as pool:
        results = [*pool.map(lambda size: model(**inputs(size))["y"], sizes)]

    assert all(map(torch.equal, results, map(expected.__getitem__, sizes)))


def test_memory_does_not_grow(network: Packaged) -> None:
    """Neither with calls nor with loading: 150 copies of the code would take 50 MB."""
    process, batch = psutil.Process(), inputs(16)

    def use(loads: int, calls: int) -> int:
        for _ in range(loads):
            load_package(network.path)(**batch)
        model = load_package(network.path)
        for _ in range(calls):
            model(**batch)
        gc.collect()
        return process.memory_info().rss

    before = use(20, 300)

    assert use(150, 3000) - before < 15e6


@pytest.fixture
def too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels use no more than an old CPU has."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")


@pytest.mark.usefixtures("too_old")
def test_a_cpu_that_lacks_instructions(network: Packaged) -> None:
    with pytest.raises(UnsupportedHostError, match="needs avx2") as error:
        load_package(network.path)

    assert "avx2" in error.value.missing_features
    assert "ONEDNN_MAX_CPU_ISA=AVX" in str(error.value)


@pytest.mark.usefixtures("too_old")
def test_nothing_is_packaged_where_it_could_not_run(dynamic: Packaged, tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match="unset it"):
        package(dynamic.reference, torch.randn(4, 16), DYNAMIC, tmp_path / "model.pt2")


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
def test_a_package_without_its_kernels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 04: without freezing and passes torch makes a float package, and says nothing."""
    x = torch.randn(4, 8)
    reference = quantize(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).eval(), x, BACKEND, [x])
    config = BACKEND.inductor_settings.config_values() | {"freezing": False}
    compiling = sys.modules["versatil_core.compile"]
    monkeypatch.setattr(compiling, "inductor_values", lambda _: config)
    before = process_state(with_patterns=False)

    with pytest.raises(PackagingError, match="calls 0 int8 kernels, and the audit says 2"):
        package(reference, x, BACKEND, tmp_path / "model.pt2")

    assert list(tmp_path.iterdir()) == []
    assert changed(before, process_state(with_patterns=False)) == []
