"""What package() refuses, before the long work and after it; nothing is compiled here.

That what it writes runs is tested by the hardware packages.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from versatil_core import (
    InputError,
    LoweringError,
    ModelFileError,
    PackagingError,
    UnsupportedHostError,
    _torch_compat,
    load_package,
    lower,
    package,
    quantize,
    read_manifest,
)
from versatil_core._torch_compat import CallStructure
from versatil_core.model_file import read_model_file
from versatil_passes import LoweringRules

Backend = Callable[..., Any]
FOLDER = "archive/data/aotinductor/model"
KERNEL = "CHECK(aoti_torch_cpu__qlinear_pointwise_tensor(buf0, x_scale));\n"
X = torch.ones(2, 4)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.linear(x)}


class Counting(Model):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.linear(x) + self.calls.view(1, 1).add_(1)}


@pytest.fixture
def reference(linear_backend: Backend) -> GraphModule:
    torch.manual_seed(0)
    return quantize(Model(), X, linear_backend(), [X])


@pytest.fixture
def backend(linear_backend: Backend) -> Any:
    return linear_backend()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file that is there already."""
    (tmp_path / "model.pt2").write_bytes(b"older")
    return tmp_path / "model.pt2"


@pytest.fixture
def no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        pytest.fail("it was compiled")

    monkeypatch.setattr(_torch_compat, "compile_ahead_of_time", fail)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return what stands in for the result of compiling."""
    command = f"// Compile cmd\n// g++ -I ~me/include {KERNEL}"
    members = {
        f"{FOLDER}/model.wrapper.cpp": f"{KERNEL}\n{command}".encode(),
        f"{FOLDER}/model.wrapper.so": b"library",
    }
    monkeypatch.setattr(_torch_compat, "compile_ahead_of_time", lambda *_: members)
    return members


def let_it_give(
    monkeypatch: pytest.MonkeyPatch, result: Callable[[Any], Any], reference: GraphModule
) -> None:
    """Let the native code give something made of the reference's result."""

    class StandIn:
        structure = CallStructure.of_module(reference)

        def __call__(self, tensors: list[Tensor]) -> Any:
            return result(reference(*tensors)["y"])

    monkeypatch.setattr(sys.modules["versatil_core.package"], "load_native", lambda *_: StandIn())


@pytest.mark.usefixtures("compiled")
def test_what_is_verified_is_written(
    reference: GraphModule, backend: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_it_give(monkeypatch, lambda y: {"y": y.float()}, reference)

    manifest = package(reference, X, backend, path)

    assert manifest == read_manifest(path)
    assert manifest.package is not None
    assert manifest.package.int8_kernel_calls == 1
    assert manifest.package.cpu_features == backend.cpu_features
    assert manifest.package.settings == {"freezing": "True", "VERSATIL_TEST_BACKEND": "on"}
    assert manifest.package.audit["int8_count"] == 1
    code = read_model_file(path).members[f"{FOLDER}/model.wrapper.cpp"]
    assert code.decode() == KERNEL


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda y: y, "nest otherwise"),
        (lambda y: {"z": y}, "nest otherwise"),
        (lambda y: {"y": y.half()}, r"a tensor \(2, 3\) of torch.float16, but .* torch.float32"),
        (lambda y: {"y": y[:1]}, r"a tensor \(1, 3\)"),
        (lambda _: {"y": 7}, "result 0 of the package is 7, but"),
        (lambda y: {"y": y / 0}, "infinities or NaNs in different places"),
    ],
)
@pytest.mark.usefixtures("compiled")
def test_other_results_are_refused(
    reference: GraphModule,
    backend: Any,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    result: Callable[[Tensor], Any],
    reason: str,
) -> None:
    let_it_give(monkeypatch, result, reference)

    with pytest.raises(PackagingError, match=reason):
        package(reference, X, backend, path)

    assert path.read_bytes() == b"older"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("noise", "warnings"), [(1e-3, 0), (1.0, 1)])
@pytest.mark.usefixtures("compiled")
def test_distant_results_are_told(
    reference: GraphModule,
    backend: Any,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    noise: float,
    warnings: int,
) -> None:
    let_it_give(monkeypatch, lambda y: {"y": y * (1 + noise)}, reference)

    with caplog.at_level(logging.WARNING, "versatil_core"):
        package(reference, X, backend, path)

    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warnings
    assert all("only 0.0 dB from the reference's" in message for message in messages)


def test_fewer_kernels_than_the_audit_says(
    compiled: dict[str, bytes], reference: GraphModule, backend: Any, path: Path
) -> None:
    compiled[f"{FOLDER}/model.wrapper.cpp"] = b"extern_kernels_addmm(buf0);"

    with pytest.raises(PackagingError, match="calls 0 int8 kernels, and the audit says 1"):
        package(reference, X, backend, path)

    assert path.read_bytes() == b"older"


def test_a_failure_of_torch_is_explained(
    reference: GraphModule, backend: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(_torch_compat, "compile_ahead_of_time", fail)

    with pytest.raises(PackagingError, match="NotImplementedError: no such operator") as error:
        package(reference, X, backend, path)

    assert isinstance(error.value.__cause__, NotImplementedError)
    assert path.read_bytes() == b"older"


@pytest.mark.usefixtures("no_compilation")
def test_a_model_that_remembers_is_refused(backend: Any, path: Path) -> None:
    reference = quantize(Counting(), X, backend, [X])

    with pytest.raises(PackagingError, match="writes to its own calls"):
        package(reference, X, backend, path)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (torch.ones(3, 4), "use size 2 in dimension 0"),
        ((X, X), "1 inputs"),
        ({"y": X}, "by name y"),
        (X.double(), "expected torch.float32"),
    ],
)
@pytest.mark.usefixtures("no_compilation")
def test_examples_that_do_not_fit(
    reference: GraphModule, backend: Any, path: Path, inputs: Any, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        package(reference, inputs, backend, path)


@pytest.mark.parametrize("name", ["", "nowhere/model.pt2", "model.pt2/model.pt2"])
@pytest.mark.usefixtures("no_compilation")
def test_a_place_that_cannot_be_written(
    reference: GraphModule, backend: Any, path: Path, name: str
) -> None:
    with pytest.raises(ModelFileError, match="cannot be written") as error:
        package(reference, X, backend, path.parent / name)

    assert error.value.path == str(path.parent / name)


@pytest.mark.usefixtures("no_compilation")
def test_without_a_compiler(
    reference: GraphModule, backend: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")

    with pytest.raises(PackagingError, match=r"CXX='no-such-compiler'.*apt-get install g\+\+"):
        package(reference, X, backend, path)


@pytest.mark.usefixtures("no_compilation")
def test_where_the_kernels_may_not_use_the_whole_cpu(
    reference: GraphModule, backend: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(backend), "cpu_features", backend.cpu_features[1:])

    with pytest.raises(PackagingError, match="ONEDNN_MAX_CPU_ISA"):
        package(reference, X, backend, path)


@pytest.mark.usefixtures("no_compilation")
def test_where_nothing_would_be_int8(
    reference: GraphModule, backend: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = LoweringRules(machine_types=backend.lowering_rules.machine_types, ops=frozenset())
    monkeypatch.setattr(type(backend), "lowering_rules", rules)

    with pytest.raises(PackagingError, match="no layer of this reference runs as int8"):
        package(reference, X, backend, path)


@pytest.mark.usefixtures("no_compilation")
def test_on_another_machine(
    reference: GraphModule, backend: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    with pytest.raises(UnsupportedHostError, match="riscv64"):
        package(reference, X, backend, path)


@pytest.mark.usefixtures("no_compilation")
def test_only_references_are_packaged(reference: GraphModule, backend: Any, path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"must come from versatil_core\.quantize"):
        package(torch.fx.symbolic_trace(Model()), X, backend, path)
    with pytest.raises(LoweringError, match="lowered already"):
        package(lower(reference, backend), X, backend, path)

    assert path.read_bytes() == b"older"


def test_a_package_that_is_only_said_to_be_one(path: Path) -> None:
    with pytest.raises(ModelFileError, match="not a model file"):
        load_package(path)
