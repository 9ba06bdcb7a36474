"""Targets must exist and must not overlap."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from versatil_core import QuantizationTarget, TargetError
from versatil_core.targets import as_targets, check_targets, is_inside

Backend = Callable[..., Any]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
        self.enc2 = torch.nn.Linear(2, 2)
        self.head = torch.nn.Linear(2, 2)
        self.alias = self.head


def check(backend: Any, *paths: str) -> None:
    check_targets(Model(), [QuantizationTarget(path, backend) for path in paths])


def test_a_backend_is_a_target_for_the_whole_model(linear_backend: Backend) -> None:
    backend = linear_backend()

    assert as_targets(backend) == (QuantizationTarget("", backend),)
    assert as_targets(QuantizationTarget("enc", backend)) == (QuantizationTarget("enc", backend),)


def test_no_target_is_an_error() -> None:
    with pytest.raises(TargetError, match="empty"):
        as_targets([])


def test_something_else_is_an_error() -> None:
    with pytest.raises(TypeError, match="'enc'"):
        as_targets(["enc"])  # type: ignore[list-item]


@pytest.mark.parametrize("paths", [["enc", "enc2"], ["enc.0", "enc.1"], ["alias"], [""]])
def test_good_targets(linear_backend: Backend, paths: list[str]) -> None:
    check(linear_backend(), *paths)


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("hed", "head"),
        ("L['self'].enc.0", "enc.0"),
        ("self.head", "head"),
        ("enc[0]", "enc.0"),
        ("enc.5", "enc.0"),
    ],
)
def test_a_wrong_path_gets_a_suggestion(
    linear_backend: Backend, path: str, suggestion: str
) -> None:
    with pytest.raises(TargetError, match="did you mean") as error:
        check(linear_backend(), path)

    assert suggestion in error.value.suggestions
    assert error.value.module_paths == (path,)
    assert repr(suggestion) in str(error.value)


def test_a_path_like_no_other_lists_the_modules(linear_backend: Backend) -> None:
    with pytest.raises(TargetError, match="its modules are 'enc', 'enc2', 'head'"):
        check(linear_backend(), "zzzzzzzz")


@pytest.mark.parametrize(
    "paths", [("enc", "enc.1"), ("enc.1", "enc"), ("", "head"), ("enc", "enc")]
)
def test_overlaps_name_both(linear_backend: Backend, paths: tuple[str, str]) -> None:
    with pytest.raises(TargetError, match="overlap") as error:
        check(linear_backend(), *paths)

    assert error.value.module_paths == paths
    assert all(repr(path) in str(error.value) for path in paths)


def test_a_name_that_begins_alike_is_not_inside() -> None:
    assert not is_inside("enc2", "enc")
    assert is_inside("enc.2", "enc")
    assert is_inside("enc", "")
