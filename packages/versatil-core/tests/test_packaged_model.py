"""What is checked before native code runs, when a package is loaded and at each call.

The native code is a stand-in here; what is real is tested by the hardware packages.
"""

import copy
import io
import logging
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx import GraphModule

from versatil_core import (
    BackendNotFoundError,
    InputError,
    ModelFileError,
    PackagedModel,
    PackagingError,
    UnsupportedHostError,
    UnsupportedVersionError,
    load,
    load_package,
    quantize,
    reference_info,
    save,
)
from versatil_core._torch_compat import CallStructure, NativeModel
from versatil_core.host import read_host
from versatil_core.manifest import Manifest, PackageInfo, manifest_values, parse_manifest
from versatil_core.model_file import write_model_file
from versatil_core.reference_info import TargetInfo

FOLDER = "archive/data/aotinductor/model"
LIBRARY = {f"{FOLDER}/model.wrapper.so": b"no library at all"}

Backend = Callable[..., Any]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(
        self, x: Tensor, *, more: dict[str, Tensor], scale: float = 2.0
    ) -> dict[str, Tensor]:
        return {"y": self.linear(x).sum((2, 3)) * scale + more["a"] + more["b"]}


def inputs(batch: int = 3) -> dict[str, Any]:
    return {
        "x": torch.randn(batch, 1, 5, 4),
        "more": {"a": torch.randn(batch, 3), "b": torch.randn(3)},
        "scale": 3.0,
    }


class StandIn:
    """Keeps the tensors that would go to native code."""

    def __init__(self, reference: GraphModule) -> None:
        self.structure = CallStructure.of_module(reference)
        self.given: list[Tensor] = []

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        self.given = [*tensors]
        return tensors[0].sum()


@pytest.fixture
def reference(linear_backend: Backend) -> GraphModule:
    batch = Dim("batch", max=16)
    shapes = {"x": {0: batch}, "more": {"a": {0: batch}, "b": None}, "scale": None}
    return quantize(Model(), inputs(), linear_backend(), [inputs()], dynamic_shapes=shapes)


@pytest.fixture
def package_info() -> PackageInfo:
    host = read_host()
    target = TargetInfo("", "test_linear", {})
    return PackageInfo(target, host.machine, "this one", host.instruction_sets, {}, {}, 1)


@pytest.fixture
def manifest(reference: GraphModule, package_info: PackageInfo) -> Manifest:
    values = manifest_values(reference_info(reference), package_info)
    return parse_manifest("model.pt2", {**values, "members": {}})


@pytest.fixture
def native(reference: GraphModule) -> StandIn:
    return StandIn(reference)


@pytest.fixture
def model(native: StandIn, manifest: Manifest) -> PackagedModel:
    return PackagedModel(native, manifest)  # type: ignore[arg-type]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, linear_backend: Backend) -> None:
    """Install the backend that made the packages."""
    loading = sys.modules["versatil_core.packaged_model"]
    monkeypatch.setattr(loading, "create_backend", lambda _, options: linear_backend(**options))


@pytest.fixture
def no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as soon as anything of a package would be run."""
    monkeypatch.setattr(NativeModel, "__init__", lambda *_: pytest.fail("native code was loaded"))


def write(path: Path, reference: GraphModule, info: PackageInfo, **values: Any) -> Path:
    manifest = manifest_values(reference_info(reference), info)
    write_model_file(path / "model.pt2", {**manifest, **values}, LIBRARY)
    return path / "model.pt2"


@pytest.fixture
def file(tmp_path: Path, reference: GraphModule, package_info: PackageInfo) -> Path:
    """Return a package whose native code is none."""
    return write(tmp_path, reference, package_info)


@pytest.mark.usefixtures("installed")
def test_what_is_no_library(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    with pytest.raises(ModelFileError, match=r"cannot be loaded.*TMPDIR") as error:
        load_package(file)

    assert error.value.path == str(file)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.usefixtures("installed", "no_native_code")
@pytest.mark.parametrize("members", [{}, {f"{FOLDER}/more.so": b"a second"}])
def test_not_one_library(
    file: Path, members: dict[str, bytes], reference: GraphModule, package_info: PackageInfo
) -> None:
    others = {f"{FOLDER}/model.wrapper.cpp": b"code"}
    values = manifest_values(reference_info(reference), package_info)
    write_model_file(file, values, {**others, **members, **(LIBRARY if members else {})})

    with pytest.raises(ModelFileError, match=r"holds (0|2) shared libraries instead of one"):
        load_package(file)


@pytest.mark.usefixtures("installed", "no_native_code")
def test_another_torch(tmp_path: Path, reference: GraphModule, package_info: PackageInfo) -> None:
    file = write(tmp_path, reference, package_info, written_with={"torch": "2.1.2"})

    with pytest.raises(UnsupportedVersionError, match=r"packaged with torch 2.1.2") as error:
        load_package(file)

    assert error.value.supported == "==2.1.*"


@pytest.mark.usefixtures("installed", "no_native_code")
def test_another_format(tmp_path: Path, reference: GraphModule, package_info: PackageInfo) -> None:
    with pytest.raises(ModelFileError, match="format version 99"):
        load_package(write(tmp_path, reference, package_info, format_version=99))


@pytest.mark.usefixtures("installed", "no_native_code")
def test_a_changed_member(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b"no library at all", b"A library at all!"))

    with pytest.raises(ModelFileError):
        load_package(file)


@pytest.mark.usefixtures("no_native_code")
def test_a_backend_that_is_not_installed(file: Path) -> None:
    with pytest.raises(BackendNotFoundError, match="test_linear"):
        load_package(file)


@pytest.mark.usefixtures("installed", "no_native_code")
def test_another_machine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    with pytest.raises(UnsupportedHostError, match="this machine is riscv64"):
        load_package(file)


@pytest.mark.usefixtures("installed", "no_native_code")
def test_a_machine_of_another_kind_that_the_backend_serves(
    tmp_path: Path, reference: GraphModule, package_info: PackageInfo
) -> None:
    other = next(name for name in ("x86_64", "aarch64") if name != package_info.machine)
    file = write(tmp_path, reference, replace(package_info, machine=other))

    with pytest.raises(UnsupportedHostError, match=f"is for {other}") as error:
        load_package(file)

    assert error.value.machine_types == (other,)


@pytest.mark.usefixtures("installed", "no_native_code")
def test_missing_instructions_are_named(
    tmp_path: Path,
    reference: GraphModule,
    package_info: PackageInfo,
    linear_backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = replace(package_info, cpu="a better one", cpu_features=("aes", "avx512_vnni", "fma"))
    monkeypatch.setattr(linear_backend, "cpu_features", ("fma", "avx2"))

    with pytest.raises(UnsupportedHostError) as error:
        load_package(write(tmp_path, reference, needs))

    assert error.value.missing_features == ("avx512_vnni", "aes")
    message = str(error.value)
    assert "needs avx512_vnni, aes; this CPU has avx2. It was packaged on a better one" in message


@pytest.mark.usefixtures("installed")
def test_unused_instructions_are_told(
    file: Path,
    package_info: PackageInfo,
    linear_backend: Backend,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = (*package_info.cpu_features, "i8mm", "of no consequence")
    monkeypatch.setattr(linear_backend, "cpu_features", more)

    with caplog.at_level(logging.WARNING), pytest.raises(ModelFileError, match="cannot be loaded"):
        load_package(file)

    [record] = caplog.records
    assert "packaged on a CPU without i8mm, which this one has" in record.getMessage()


@pytest.mark.usefixtures("installed", "no_native_code")
def test_the_two_kinds_are_told_apart(file: Path, reference: GraphModule, tmp_path: Path) -> None:
    save(reference, tmp_path / "portable.pt2")

    with pytest.raises(ModelFileError, match=r"versatil_core.load\(\) reads it"):
        load_package(tmp_path / "portable.pt2")
    with pytest.raises(ModelFileError, match=r"versatil_core.load_package\(\) reads it"):
        load(file)


@pytest.mark.usefixtures("installed")
def test_code_for_other_inputs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_input(native: Any, _: str) -> None:
        native.structure = CallStructure(torch.utils._pytree.tree_structure(((0,), {})))

    monkeypatch.setattr(NativeModel, "__init__", one_input)

    with pytest.raises(ModelFileError, match="code for 1 inputs, but its manifest describes 4"):
        load_package(file)


def test_inputs_go_in_the_order_of_the_graph(model: PackagedModel, native: StandIn) -> None:
    given = inputs()
    more = {"b": given["more"]["b"], "a": given["more"]["a"]}

    model(scale=3.0, more=more, x=given["x"])

    wanted = given["x"], more["a"], more["b"]
    assert all(map(torch.equal, native.given, wanted))
    assert len(native.given) == len(wanted)


def test_native_code_gets_plain_tensors(model: PackagedModel, native: StandIn) -> None:
    """With the strides that it was made for, of its own memory only if they differ."""
    given = inputs(2)
    transposed = torch.randn(4, 5, 1, 2, requires_grad=True).permute(3, 2, 1, 0)
    # Contiguous by torch's rules, with a stride that no loop has to heed.
    odd = torch.randn(2, 1, 5, 4).as_strided((2, 1, 5, 4), (20, 7, 4, 1))
    negative = torch._neg_view(torch.randn(2, 1, 5, 4))

    for x in (transposed, odd, negative, given["x"]):
        model(**{**given, "x": x})
        [received, *_] = native.given
        assert received.stride() == (20, 20, 4, 1)
        assert torch.equal(received, x)
        assert not received.requires_grad
        assert not received.is_neg()
    assert native.given[0].data_ptr() == given["x"].data_ptr()


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"x": torch.zeros(17, 1, 5, 4)}, "x", "must be in 1 … 16"),
        ({"x": torch.zeros(3, 1, 5, 5)}, "x", "expected the shape"),
        ({"x": torch.zeros(3, 1, 5, 4).half()}, "x", "expected torch.float32, got torch.float16"),
        ({"x": torch.zeros(2, 1, 5, 4)}, "more_a", "must be equal"),
        ({"x": torch.zeros(3, 1, 5, 4).numpy()}, "x", "expected a tensor, got ndarray"),
        ({"x": torch.zeros(3, 1, 5, 4, device="meta")}, "x", "call .cpu"),
        ({"x": torch.zeros(3, 1, 5, 4).to_sparse()}, "x", "without memory of its own"),
        ({"x": FakeTensorMode().from_tensor(torch.zeros(3, 1, 5, 4))}, "x", "without memory"),
        ({"x": None}, "x", "expected a tensor, got NoneType"),
        ({"scale": 2.0}, "scale", "expected the constant 3.0"),
    ],
)
def test_an_input_that_does_not_fit(
    model: PackagedModel, native: StandIn, change: dict[str, Any], name: str, reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as error:
        model(**{**inputs(), **change})

    assert error.value.input_name == name
    assert native.given == []


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((torch.zeros(3, 1, 5, 4),), {}),
        ((torch.zeros(3, 1, 5, 4),), inputs()),
        ((), {**inputs(), "more": [torch.zeros(3, 3), torch.zeros(3)]}),
        ((), {**inputs(), "more": {"a": torch.zeros(3, 3), "c": torch.zeros(3)}}),
        ((), {**inputs(), "surplus": torch.zeros(1)}),
        ((), {**inputs(), "x": [torch.zeros(3, 1, 5, 4)]}),
    ],
)
def test_inputs_that_nest_otherwise(
    model: PackagedModel, native: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match="0 by position and by name x, more, scale") as error:
        model(*args, **kwargs)

    assert error.value.input_name is None
    assert native.given == []


def test_copies_share_the_code(model: PackagedModel, native: StandIn) -> None:
    whole = torch.nn.Sequential(model)

    for copied in (copy.deepcopy(whole)[0], copy.copy(model)):
        assert copied is not model
        assert copied.manifest == model.manifest
        native.given = []
        copied(**inputs())
        assert native.given


def test_modes_are_those_of_any_module(model: PackagedModel) -> None:
    assert model.eval() is model
    assert not copy.deepcopy(model).training
    assert model.train().training
    assert [*model.parameters(), *model.buffers()] == []


@pytest.mark.parametrize(
    "dump", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())], ids=["pickle", "torch"]
)
def test_pickling_names_the_way_out(model: PackagedModel, dump: Callable[[Any], Any]) -> None:
    with pytest.raises(PackagingError, match=r"load_package\(path\)"):
        dump(model)
