from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from versatil_passes import LoweringRules, RulesError

MACHINE = ("x86_64",)


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ({"ops": frozenset({"conv4d"})}, "unknown op 'conv4d'"),
        ({"dynamic_ops": frozenset({"lineer"})}, "unknown op 'lineer'"),
        ({"post_ops": {"matmul": frozenset({"relu"})}}, "unknown op 'matmul'"),
        ({"residual_post_ops": {"bmm": frozenset({"relu"})}}, "unknown op 'bmm'"),
        ({"post_ops": {"linear": frozenset({"relu6"})}}, "unknown post op 'relu6'"),
        ({"residual_post_ops": {"linear": frozenset({"elu"})}}, "unknown residual post op 'elu'"),
        ({"weight_granularities": frozenset({"per_row"})}, "unknown weight granularity 'per_row'"),
        ({"kernels": "acl"}, "unknown kind of kernels 'acl'"),
        ({"without_passes": frozenset({"Int8"})}, "unknown pass to leave out 'Int8'"),
    ],
)
def test_a_misspelled_name_is_refused(rules: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RulesError, match=f"{complaint} in LoweringRules: use one of"):
        LoweringRules(MACHINE, **rules)


@pytest.mark.parametrize("post_op", ["silu", "gelu", "hardswish", "hardtanh"])
def test_only_relu_may_follow_an_addition(post_op: str) -> None:
    """The addition is written out for it alone: any other would be dropped."""
    with pytest.raises(RulesError, match=f"'{post_op}'"):
        LoweringRules(MACHINE, residual_post_ops={"linear": frozenset({"relu", post_op})})


def test_what_is_left_out_is_not_admitted() -> None:
    rules = LoweringRules(MACHINE)
    assert not rules.admits_post_op("linear", "relu", has_residual=False)
    assert not rules.admits_post_op("linear", "relu", has_residual=True)
    assert rules.activation_dtypes == (torch.uint8,)
    assert rules.dynamic_ops == {"linear"}
    assert rules.saturating_pairs is None
    assert rules.without_passes == frozenset()
    assert (rules.kernels, rules.columns_bytes_max, rules.kernel_class) == ("onednn", None, "")


def test_a_rule_holds_for_its_op_and_its_place_alone() -> None:
    rules = LoweringRules(
        MACHINE,
        post_ops={"linear": frozenset({"silu"})},
        residual_post_ops={"conv2d": frozenset({"relu"})},
    )
    admitted = {
        (op, post_op, has_residual)
        for op in ("linear", "conv1d", "conv2d")
        for post_op in ("relu", "silu")
        for has_residual in (False, True)
        if rules.admits_post_op(op, post_op, has_residual=has_residual)
    }
    assert admitted == {("linear", "silu", False), ("conv2d", "relu", True)}


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        ({"post_ops": {"linear": frozenset({"relu", "silu"})}}, "silu"),
        ({"residual_post_ops": {"conv2d": frozenset({"relu"})}}, "add"),
        ({"residual_post_ops": {"conv2d": frozenset()}}, "add"),
    ],
)
def test_a_product_of_matrices_has_no_post_op_but_relu(rules: dict[str, Any], name: str) -> None:
    """:class:`GemmKernels` would leave them to nobody."""
    gemm: dict[str, Any] = {"kernels": "gemm", "allow_int8_output": False}
    with pytest.raises(RulesError, match=f"post op with kernels='gemm' '{name}'"):
        LoweringRules(MACHINE, **gemm, **rules)
    LoweringRules(MACHINE, **gemm, post_ops={"linear": frozenset({"relu"})})


def test_a_product_of_matrices_has_no_int8_output() -> None:
    with pytest.raises(RulesError, match=r"'allow_int8_output=True'.*'allow_int8_output=False'"):
        LoweringRules(MACHINE, kernels="gemm")


def test_rules_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        LoweringRules(MACHINE).allow_int8_output = False  # type: ignore[misc]
