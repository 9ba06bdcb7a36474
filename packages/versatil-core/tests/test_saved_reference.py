"""A saved reference is portable, and a file is replaced whole or not at all."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.fx import GraphModule

from versatil_core import ModelFileError, load, quantize, read_manifest, reference_info, save

Backend = Callable[..., Any]


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


def test_a_file_without_reasons_loads(file: Path) -> None:
    def without_reasons(name: str, data: bytes) -> bytes:
        if not name.endswith("versatil_manifest.json"):
            return data
        manifest = json.loads(data)
        text = json.dumps(manifest)
        assert text.count('"reasons": {}') == 1
        return text.replace(', "reasons": {}', "").encode()

    edit(file, without_reasons)

    assert b"reasons" not in b"".join(
        zipfile.ZipFile(file).read(name)
        for name in zipfile.ZipFile(file).namelist()
        if name.endswith("versatil_manifest.json")
    )
    assert reference_info(load(file)).targets[0].reasons == {}


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


def test_the_manifest_is_read_without_loading(
    file: Path, reference: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.export, "load", lambda *_, **__: pytest.fail("loaded"))

    manifest = read_manifest(file)

    assert manifest.format_version == 1
    assert manifest.info == reference_info(reference)


def test_a_failure_keeps_the_old_file(
    reference: GraphModule, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def fail(_program: Any, stream: Any, **_: Any) -> None:
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(ModelFileError, match="No space left"):
        save(reference, file)

    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_missing_folder(reference: GraphModule, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be written") as error:
        save(reference, tmp_path / "nowhere" / "model.pt2")

    assert error.value.path == str(tmp_path / "nowhere" / "model.pt2")


def test_only_references_are_saved(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"versatil_core\.quantize"):
        save(torch.fx.symbolic_trace(torch.nn.ReLU()), tmp_path / "model.pt2")

    assert list(tmp_path.iterdir()) == []


def test_the_file_has_ordinary_permissions(file: Path) -> None:
    ordinary = file.with_name("ordinary")
    ordinary.touch()

    assert file.stat().st_mode == ordinary.stat().st_mode


@pytest.mark.parametrize("read", [load, read_manifest])
@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "does not exist"), (b"", "not a model file"), (b"hello" * 99, "not a model file")],
    ids=["missing", "empty", "text"],
)
def test_no_model_file(
    tmp_path: Path, read: Callable[[Path], Any], content: bytes | None, reason: str
) -> None:
    path = tmp_path / "model.pt2"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ModelFileError, match=reason) as error:
        read(path)

    assert error.value.path == str(path)


def test_a_folder_is_no_model_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not a model file"):
        load(tmp_path)


def test_a_truncated_file(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])

    with pytest.raises(ModelFileError, match="damaged"):
        load(file)


def test_damage_inside(file: Path) -> None:
    edit(file, lambda name, data: b"{}" if name.endswith("models/model.json") else data)

    with pytest.raises(ModelFileError, match="cannot be loaded"):
        load(file)


def test_a_float_program_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "float.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.randn(1, 2),)), path)

    with pytest.raises(ModelFileError, match="quantize it first"):
        load(path)


def test_another_format_version(file: Path) -> None:
    def bump(name: str, data: bytes) -> bytes:
        if name.endswith("versatil_manifest.json"):
            return json.dumps({**json.loads(data), "format_version": 99}).encode()
        return data

    edit(file, bump)

    with pytest.raises(ModelFileError, match="format version 99, and this versatil-core reads 1"):
        load(file)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"format_version": 1}'])
def test_a_damaged_manifest(file: Path, text: bytes) -> None:
    edit(file, lambda name, data: text if name.endswith("versatil_manifest.json") else data)

    with pytest.raises(ModelFileError, match="damaged manifest"):
        read_manifest(file)


def edit(file: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Rewrite the members of a zip file."""
    edited = file.with_suffix(".edited")
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(edited, "w") as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    shutil.move(edited, file)
