"""What `versatil quantize` can be given, and what it says about everything else."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from versatil_core.model_factory import (
    ModelSource,
    ModelSourceError,
    load_batches,
    load_model_source,
)
from versatil_passes.errors import VersatilError

FACTORIES = """
import torch
def model(): return torch.nn.Linear(4, 2)
def with_example(): return torch.nn.Linear(4, 2), torch.ones(3, 4)
def with_calibration():
    return torch.nn.Linear(4, 2), (torch.ones(3, 4),), [(torch.ones(3, 4),), torch.zeros(3, 4)]
def broken(): raise RuntimeError("no weights here\\nsecond line")
def returns_text(): return "model"
def returns_too_much(): return torch.nn.Linear(4, 2), torch.ones(1), [], 4
def by_name(): return torch.nn.Linear(4, 2), {"input": torch.ones(3, 4)}
def wrong_example(): return torch.nn.Linear(4, 2), "text"
def wrong_element(): return torch.nn.Linear(4, 2), {"x": 3}
def wrong_calibration(): return torch.nn.Linear(4, 2), torch.ones(1, 4), torch.ones(9, 4)
ready = torch.nn.Linear(4, 2)
number = 3
"""
unique = itertools.count()


def tensors(batch: tuple[torch.Tensor, ...] | dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a fresh module with the factories, in the working directory."""
    name = f"factories_{next(unique)}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize("factory", ["model", "ready"])
def test_model_alone(module: str, factory: str) -> None:
    source = load_model_source(f"{module}:{factory}")
    assert isinstance(source.model, nn.Linear)
    assert source == ModelSource(source.model)


def test_example_inputs_may_be_one_tensor(module: str) -> None:
    source = load_model_source(f"{module}:with_example")
    assert source.example_inputs is not None
    assert [tensor.shape for tensor in tensors(source.example_inputs)] == [(3, 4)]


def test_example_inputs_may_have_names(module: str) -> None:
    example = load_model_source(f"{module}:by_name").example_inputs
    assert isinstance(example, dict)
    assert example["input"].shape == (3, 4)


def test_calibration_comes_as_tuples(module: str) -> None:
    source = load_model_source(f"{module}:with_calibration")
    assert source.calibration is not None
    assert [[t.sum().item() for t in tensors(batch)] for batch in source.calibration] == [
        [12.0],
        [0.0],
    ]


def test_the_search_path_is_as_before(module: str) -> None:
    before = list(sys.path)
    load_model_source(f"{module}:model")
    assert sys.path == before


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("broken", r"factory failed \(RuntimeError: no weights here\)$"),
        ("returns_text", r"returned \(str\)"),
        ("returns_too_much", r"returned \(Linear, Tensor, list, int\)"),
        ("wrong_example", "example_inputs: expected a tuple of tensors, got a str"),
        ("wrong_element", "example_inputs: expected tensors, got a int among them"),
        ("wrong_calibration", "the data are a Tensor, and must be a list"),
        ("number", "number is a int"),
        ("modle", r"has no 'modle'; did you mean 'model'"),
    ],
)
def test_factory_faults_name_the_source(module: str, factory: str, message: str) -> None:
    with pytest.raises(ModelSourceError, match=message) as caught:
        load_model_source(f"{module}:{factory}")
    assert caught.value.source == f"{module}:{factory}"
    assert isinstance(caught.value, VersatilError)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_such_module_of_ours:f", "importing no_such_module_of_ours failed"),
        ("model.bin", "neither a .pt2 file nor a factory"),
        (":f", "neither a .pt2 file nor a factory"),
        ("missing.pt2", "no such model file"),
    ],
)
def test_unusable_sources(source: str, message: str) -> None:
    with pytest.raises(ModelSourceError, match=message):
        load_model_source(source)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x05\x06" + b"\0" * 18])
def test_a_file_that_is_no_program(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    with pytest.raises(ModelSourceError, match=r"not a program that `torch.export.save` wrote"):
        load_model_source(str(path))


def test_exported_program_keeps_its_dynamic_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    batch = torch.export.Dim("batch", min=1, max=64)
    model, example = nn.Linear(4, 2), torch.ones(3, 4)
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=({0: batch},)), path)
    source = load_model_source(str(path))
    assert source.dynamic_shapes == ({0: torch.export.Dim.AUTO},)
    assert source.example_inputs is not None
    assert torch.equal(source.model(example), model(example))


def test_exported_program_with_fixed_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 2), (torch.ones(3, 4),)), path)
    assert load_model_source(str(path)).dynamic_shapes is None


def test_npz_is_cut_into_batches_of_the_examples_size(tmp_path: Path) -> None:
    path = tmp_path / "batches.npz"
    np.savez(path, ids=np.arange(14).reshape(7, 2), mask=np.ones((7, 1), np.float32))
    batches = load_batches(path, (torch.zeros(3, 2), torch.zeros(3, 1)))
    assert [[tuple(t.shape) for t in tensors(batch)] for batch in batches] == [[(3, 2), (3, 1)]] * 2
    assert tensors(batches[1])[0].tolist() == [[6, 7], [8, 9], [10, 11]]
    assert tensors(batches[0])[1].dtype is torch.float32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((8, 2))}, "holds 1 arrays, and the model has 2 inputs"),
        ({"x": np.ones((8, 2)), "y": np.ones((7, 2))}, "7 and 8 samples"),
        ({"x": np.ones((2, 2)), "y": np.ones((2, 2))}, "has 2 samples, and a batch needs 3"),
        ({"x": np.ones(()), "y": np.ones(())}, "has 0 samples"),
        ({"x": np.array([object()]), "y": np.ones(3)}, "not a .npz file"),
        ({"x": np.array(["text"] * 3), "y": np.ones(3)}, "not a .npz file"),
    ],
)
def test_npz_faults(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    path = tmp_path / "batches.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    with pytest.raises(ModelSourceError, match=message):
        load_batches(path, (torch.zeros(3, 2), torch.zeros(3, 2)))


def test_npz_by_name(tmp_path: Path) -> None:
    path = tmp_path / "batches.npz"
    np.savez(path, mask=np.ones((4, 1)), ids=np.arange(4))
    example = {"ids": torch.zeros(2), "mask": torch.zeros(2, 1)}
    batches = load_batches(path, example)
    assert [sorted(batch) for batch in batches if isinstance(batch, dict)] == [["ids", "mask"]] * 2
    assert [batch["ids"].tolist() for batch in batches if isinstance(batch, dict)] == [
        [0, 1],
        [2, 3],
    ]
    with pytest.raises(ModelSourceError, match="arrays mask, ids, and the model's inputs are ids"):
        load_batches(path, {"ids": torch.zeros(2)})


def test_npz_needs_example_inputs(tmp_path: Path) -> None:
    path = tmp_path / "batches.npz"
    np.savez(path, np.ones((8, 2)))
    with pytest.raises(ModelSourceError, match="no example inputs"):
        load_batches(path, None)


def test_pt_holds_a_list_of_batches(tmp_path: Path) -> None:
    path = tmp_path / "batches.pt"
    torch.save([(torch.ones(2), torch.zeros(1)), [torch.ones(3), torch.zeros(1)]], path)
    batches = load_batches(path, None)
    assert [[len(t) for t in batch] for batch in batches] == [[2, 1], [3, 1]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(8, 4), "the data are a Tensor"),
        ({"x": torch.ones(1)}, "the data are a dict"),
        (3, "the data are a int"),
        ([(torch.ones(1),), ("text",)], "batch 1: expected tensors, got a str"),
    ],
)
def test_pt_faults(tmp_path: Path, value: object, message: str) -> None:
    path = tmp_path / "batches.pt"
    torch.save(value, path)
    with pytest.raises(ModelSourceError, match=message):
        load_batches(path, None)


@pytest.mark.parametrize("suffix", [".pt", ".npz"])
@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_broken_calibration_files(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"batches{suffix}"
    path.write_bytes(content)
    with pytest.raises(ModelSourceError, match=f"not a .*{'npz' if suffix == '.npz' else 'list'}"):
        load_batches(path, (torch.ones(1),))


@pytest.mark.parametrize(
    ("name", "message"), [("gone.npz", "no such"), (__file__, "must be a .npz or a .pt")]
)
def test_other_calibration_paths(name: str, message: str) -> None:
    with pytest.raises(ModelSourceError, match=message):
        load_batches(Path(name), None)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    path = tmp_path / "batches.pt"
    torch.save([Bomb()], path)
    with pytest.raises(ModelSourceError, match="not a list of tuples"):
        load_batches(path, None)
    assert not (tmp_path / "ran").exists()
