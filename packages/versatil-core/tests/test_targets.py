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


@pytest.mark.parametrize(
    ("path", "pattern", "is_it"),
    [
        ("layers.3.mlp.up", "layers.*.mlp", True),
        ("layers.3.attention", "layers.*.mlp", False),
        ("layers.mlp", "layers.*.mlp", False),  # a star is one name, never none
        ("layers.3.4.mlp", "layers.*.mlp", False),  # and never two
        ("layers.3", "layers.[0-4]", True),
        ("layers.5", "layers.[0-4]", False),
        ("Layers.3", "layers.*", False),
        ("", "*", False),
    ],
)
def test_patterns(path: str, pattern: str, *, is_it: bool) -> None:
    assert is_inside(path, pattern) is is_it


def test_one_text_is_no_list(linear_backend: Backend) -> None:
    with pytest.raises(TypeError, match=r"exclude must be a list, got the text 'head'.*\['head'\]"):
        QuantizationTarget("", linear_backend(), exclude="head")
    with pytest.raises(TypeError, match="operators must be a list"):
        QuantizationTarget("", linear_backend(), operators="linear")


def test_lists_become_tuples(linear_backend: Backend) -> None:
    backend = linear_backend()
    target = QuantizationTarget("", backend, ["head"], ["linear"])

    assert target == QuantizationTarget("", backend, ("head",), ("linear",))


@pytest.mark.parametrize("name", ["exclude", "module_path"])
def test_a_pattern_that_matches_nothing(linear_backend: Backend, name: str) -> None:
    values = {"module_path": "", "exclude": ()} | {
        name: "enc.*.hed" if name == "module_path" else ["enc.*.hed"]
    }
    with pytest.raises(TargetError, match=r"no module of the model has the path 'enc\.\*\.hed'"):
        check_targets(Model(), [QuantizationTarget(backend=linear_backend(), **values)])  # type: ignore[arg-type]


def test_an_exclusion_must_be_inside_its_target(linear_backend: Backend) -> None:
    target = QuantizationTarget("enc", linear_backend(), exclude=["head"])
    with pytest.raises(TargetError, match="'head' in the target 'enc'"):
        check_targets(Model(), [target])


def test_an_unknown_operator_gets_a_suggestion(linear_backend: Backend) -> None:
    target = QuantizationTarget("", linear_backend(), operators=["liner"])
    with pytest.raises(TargetError, match="no operator has the name 'liner'") as error:
        check_targets(Model(), [target])
    assert "linear" in error.value.suggestions


def test_what_is_excluded_does_not_overlap(linear_backend: Backend) -> None:
    backend = linear_backend()
    rest = QuantizationTarget("", backend, exclude=["head", "alias"])
    check_targets(Model(), [rest, QuantizationTarget("head", backend)])
    check_targets(
        Model(),
        [
            QuantizationTarget("enc", backend, exclude=["enc.0"]),
            QuantizationTarget("enc.0", backend),
        ],
    )
    with pytest.raises(TargetError, match="both quantize 'enc'"):
        check_targets(Model(), [rest, QuantizationTarget("enc", backend)])
    with pytest.raises(
        TargetError, match=r"'enc\.\*' and 'enc\.1' overlap: both quantize 'enc\.1'"
    ):
        check(backend, "enc.*", "enc.1")


def test_different_operators_do_not_overlap(linear_backend: Backend) -> None:
    backend = linear_backend()
    linears = QuantizationTarget("", backend, operators=["linear"])
    check_targets(Model(), [linears, QuantizationTarget("enc", backend, operators=["conv2d"])])
    with pytest.raises(TargetError, match="overlap"):
        check_targets(Model(), [linears, QuantizationTarget("enc", backend)])
