"""A saved reference is portable, and a file is replaced whole or not at all."""

import copy
import json
import math
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.fx import GraphModule

from versatil_core import (
    LoweringError,
    ModelFileError,
    UnsupportedVersionError,
    load,
    quantize,
    read_manifest,
    reference_info,
    save,
)
from versatil_core.model_file import read_model_file, write_model_file

Backend = Callable[..., Any]


class Special(torch.Tensor):
    """What torch keeps as a pickle."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.linear = torch.nn.Linear(8, 4)

    def forward(
        self, ids: torch.Tensor, *, more: dict[str, torch.Tensor], scale: float = 2.0
    ) -> dict[str, torch.Tensor]:
        return {"y": self.linear(self.embedding(ids)).mean(1) * scale + more["bias"]}


def inputs(batch: int) -> dict[str, Any]:
    return {
        "ids": torch.randint(0, 11, (batch, 5)),
        "more": {"bias": torch.randn(batch, 4)},
        "scale": 3.0,
    }


@pytest.fixture
def reference(linear_backend: Backend) -> GraphModule:
    batch = Dim("batch", max=16)
    shapes = {"ids": {0: batch}, "more": {"bias": {0: batch}}, "scale": None}
    return quantize(Model(), inputs(3), linear_backend(), [inputs(3)], dynamic_shapes=shapes)


@pytest.fixture
def file(reference: GraphModule, tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    save(reference, path)
    return path


def test_round_trip(reference: GraphModule, file: Path) -> None:
    loaded = load(file)

    for size in (3, 1, 16):
        batch = inputs(size)
        assert torch.equal(loaded(**batch)["y"], reference(**batch)["y"])
    assert reference_info(loaded) == reference_info(reference)
    assert loaded.eval() is loaded
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_the_backends_reasons_are_saved(
    linear_backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"quant_max": "the CPU likes it"}
    monkeypatch.setattr(linear_backend, "option_reasons", property(lambda _: reasons))
    x = torch.randn(3, 4)
    save(quantize(torch.nn.Linear(4, 4), x, linear_backend(), [x]), tmp_path / "model.pt2")
    monkeypatch.undo()

    assert reference_info(load(tmp_path / "model.pt2")).targets[0].reasons == reasons
    assert read_manifest(tmp_path / "model.pt2").info.targets[0].reasons == reasons


def test_limits_of_dynamic_sizes_are_kept(file: Path) -> None:
    loaded = load(file)

    for bad in (inputs(17), {**inputs(3), "ids": torch.zeros(3, 6, dtype=torch.int64)}):
        with pytest.raises((AssertionError, RuntimeError), match="size"):
            loaded(**bad)


def test_a_loaded_reference_can_be_saved_again(file: Path, tmp_path: Path) -> None:
    loaded = load(file)
    save(loaded, tmp_path / "again.pt2")

    batch = inputs(4)
    assert torch.equal(load(tmp_path / "again.pt2")(**batch)["y"], loaded(**batch)["y"])


def test_module_paths_are_kept(file: Path) -> None:
    [linear] = [n for n in load(file).graph.nodes if n.target is torch.ops.aten.linear.default]

    assert [entry[0] for entry in linear.meta["nn_module_stack"].values()][-1] == "linear"


def test_a_fresh_process_needs_nothing_else(reference: GraphModule, file: Path) -> None:
    """Case 09; nor is the backend that the model was quantized for installed there."""
    batch = inputs(2)
    torch.save((batch, reference(**batch)["y"]), file.with_suffix(".pt"))
    code = (
        "import sys, torch; from versatil_core import load; "
        "batch, want = torch.load(sys.argv[2]); "
        "assert torch.equal(load(sys.argv[1])(**batch)['y'], want)"
    )

    result = subprocess.run(
        [sys.executable, "-c", code, str(file), str(file.with_suffix(".pt"))],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr


def test_a_failure_keeps_the_old_file(
    reference: GraphModule, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", fail)
    with pytest.raises(ModelFileError, match="No space left"):
        save(reference, file)

    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_only_references_are_saved(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"versatil_core\.quantize"):
        save(torch.fx.symbolic_trace(torch.nn.ReLU()), tmp_path / "model.pt2")

    assert list(tmp_path.iterdir()) == []


def test_the_same_reference_is_the_same_file(reference: GraphModule, file: Path) -> None:
    again = file.with_name("again.pt2")
    save(reference, again)

    assert again.read_bytes() == file.read_bytes()


def test_a_float_program_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "float.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.randn(1, 2),)), path)

    with pytest.raises(ModelFileError, match="quantize it first"):
        load(path)


def test_nothing_in_it_is_a_pickle(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}

    assert [data for name, data in contents.items() if "sample_inputs" in name] == [b""]
    # Every protocol that torch has written starts like this, or as a zip file of its own.
    assert not [name for name, data in contents.items() if data[:2] in {b"\x80\x02", b"PK"}]


def test_nothing_of_this_machine_is_in_it(file: Path) -> None:
    contents = read_model_file(file)

    text = json.dumps(dict(contents.manifest)).encode() + b"".join(contents.members.values())
    assert str(Path(__file__).parent).encode() not in text
    assert b"def forward" not in text


def test_loading_unpickles_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((torch, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("unpickled"))

    assert isinstance(load(file), GraphModule)


def test_a_tensor_that_only_a_pickle_could_keep(reference: GraphModule, tmp_path: Path) -> None:
    reference.get_submodule("embedding").weight = torch.nn.Parameter(
        torch.randn(11, 8).as_subclass(Special), requires_grad=False
    )

    with pytest.raises(ModelFileError, match=r"embedding\.weight is no plain tensor"):
        save(reference, tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("member", "before", "after", "reason"),
    [
        (
            "models/model.json",
            "torch.ops.aten.mean.dim",
            "torch.serialization.os.system",
            "calls 'torch.serialization.os.system'",
        ),
        (
            "models/model.json",
            "<= 16",
            "<= 16 or __import__('os').getpid()",
            "more than arithmetic",
        ),
        ("models/model.json", "Symbol('", "sympify('", "more than arithmetic"),
        ("models/model.json", '"opset_version"', '"opset"', "TypeError|KeyError"),
        ("model_weights_config.json", '"use_pickle": false', '"use_pickle": true', "only a pickle"),
        ("model_weights_config.json", '"weight_0"', '"../weight_0"', "only a pickle"),
        ("model_weights_config.json", '"weight_0"', '"opaque_obj_0"', "only a pickle"),
        ("model_weights_config.json", '"type": "cpu"', '"type": "meta"', "on the device 'meta'"),
        ("weights/weight_0", None, "", "no values of embedding"),
        ("model_weights_config.json", '"as_int": 11', '"as_int": 99999999', "storage"),
    ],
)
def test_a_program_that_was_made_to_do_harm(
    file: Path, member: str, before: str | None, after: str, reason: str
) -> None:
    """All checksums are right: whoever can write a file can write them."""

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith(member):
            return data
        text = data.decode("latin1")
        assert before is None or before in text
        return text.replace(text if before is None else before, after).encode("latin1")

    forge(file, change)

    with pytest.raises(ModelFileError, match=reason):
        load(file)


def test_a_manifest_of_another_graph(file: Path) -> None:
    found = read_model_file(file)
    inputs = [{**found.manifest["info"]["inputs"][0], "dtype": "torch.int32"}]
    info = {**found.manifest["info"], "inputs": inputs + found.manifest["info"]["inputs"][1:]}
    write_model_file(file, {**found.manifest, "info": info}, found.members)

    with pytest.raises(ModelFileError, match="other inputs than the graph"):
        load(file)


def test_a_lowered_module_is_not_saved(reference: GraphModule, tmp_path: Path) -> None:
    lowered = copy.copy(reference)
    lowered.meta = {**reference.meta, "versatil_lowering": None}

    with pytest.raises(LoweringError, match="save the reference"):
        save(lowered, tmp_path / "model.pt2")


def test_pickled_examples_are_not_read(file: Path) -> None:
    forge(file, lambda name, data: b"evil" if name.endswith("sample_inputs/model.pt") else data)

    with pytest.raises(ModelFileError, match=r"model\.pt is a pickle"):
        load(file)


def test_members_that_no_portable_file_has(file: Path) -> None:
    found = read_model_file(file)
    write_model_file(file, found.manifest, {**found.members, "archive/data/code.py": b"evil"})

    with pytest.raises(ModelFileError, match=r"archive/data/code\.py has no place"):
        load(file)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": 99}, "format version 99, and this versatil-core .* reads 2"),
        ({"format_version": 1}, "format version 1, "),
        ({"kind": "package"}, "damaged manifest: ValueError: kind 'package'"),
        ({"info": {}}, "damaged manifest: KeyError: 'targets'"),
        ({"written_with": {"torch": "what"}}, "damaged manifest: InvalidVersion"),
        ({"written_with": []}, "damaged manifest: TypeError"),
        ({"package": {"int8_kernel_calls": math.inf}}, "damaged manifest"),
    ],
)
def test_manifests_that_do_not_fit(file: Path, change: dict[str, Any], reason: str) -> None:
    found = read_model_file(file)
    write_model_file(file, {**found.manifest, **change}, found.members)

    for read in (load, read_manifest):
        with pytest.raises(ModelFileError, match=reason):
            read(file)


def test_a_newer_torch_wrote_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_model_file(file)
    versions = {**found.manifest["written_with"], "torch": "2.99.1"}
    write_model_file(file, {**found.manifest, "written_with": versions}, found.members)

    with pytest.raises(UnsupportedVersionError, match=r"torch 2\.99\.1.*'torch>=2\.99'"):
        load(file)

    monkeypatch.setenv("VERSATIL_ALLOW_UNTESTED_VERSIONS", "1")
    assert isinstance(load(file), GraphModule)


def test_damaged_files_are_never_loaded(file: Path, reference: GraphModule) -> None:
    """Also those whose damage is where nobody looks: the result is right, or there is an error."""
    original, batch = file.read_bytes(), inputs(2)
    wanted = reference(**batch)["y"]
    random = Random(0)  # noqa: S311 -- no secret depends on it
    for _ in range(2000):
        content = bytearray(original)
        for _ in range(random.choice((1, 1, 1, 4))):
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(
            content[: random.choice((None, None, None, random.randrange(len(content))))]
        )
        try:
            loaded = load(file)
        except ModelFileError:
            continue
        assert torch.equal(loaded(**batch)["y"], wanted)


def forge(file: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Change members, with checksums that fit."""
    found = read_model_file(file)
    members = {name: change(name, data) for name, data in found.members.items()}
    write_model_file(file, found.manifest, members)
