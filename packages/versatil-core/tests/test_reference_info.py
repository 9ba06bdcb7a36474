"""What a reference says about itself survives JSON and copies."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.export import Dim

from versatil_core import ModelFileError, QuantizationTarget, quantize, reference_info
from versatil_core.reference_info import EqualizedLayers, ReferenceInfo, find_reference_info


@pytest.fixture
def reference(linear_backend: Callable[..., Any]) -> torch.fx.GraphModule:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    x = torch.randn(3, 4)
    target = QuantizationTarget("1", linear_backend(quant_max=255))
    return quantize(model, x, target, [x, x], dynamic_shapes=({0: Dim("n", max=9)},))


def test_it_says_how_the_reference_was_made(reference: torch.fx.GraphModule) -> None:
    info = reference_info(reference)

    [target] = info.targets
    assert (target.module_path, target.backend) == ("1", "test_linear")
    assert target.options == {"is_dynamic": False, "is_qat": False, "quant_max": 255}
    assert info.calibration_batches == 2
    assert set(info.versions) == {"torch", "torchao", "versatil-core"}


def test_reasons_of_the_backend_are_kept(
    linear_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"quant_max": "the CPU likes it"}
    monkeypatch.setattr(linear_backend, "option_reasons", property(lambda _: reasons))
    x = torch.randn(3, 4)

    info = reference_info(quantize(torch.nn.Linear(4, 4), x, linear_backend(), [x]))

    assert info.targets[0].reasons == {"quant_max": "the CPU likes it"}
    assert ReferenceInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info


def test_it_may_lack_reasons(reference: torch.fx.GraphModule) -> None:
    """As what was written before there were any."""
    values = reference_info(reference).to_dict()
    del values["targets"][0]["reasons"]

    assert ReferenceInfo.from_dict(values).targets[0].reasons == {}


def test_it_says_what_was_equalized(reference: torch.fx.GraphModule) -> None:
    done = EqualizedLayers(("query", "key"), 0.7, "layer norm", "norm", 6.5, "")
    left = EqualizedLayers(("head",), None, "", "", 0.0, "its weight is shared")
    info = replace(reference_info(reference), equalized=(done, left))

    assert ReferenceInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info


def test_it_may_lack_equalization(reference: torch.fx.GraphModule) -> None:
    """As what was written before there was any."""
    values = reference_info(reference).to_dict()
    del values["equalized"]

    assert ReferenceInfo.from_dict(values).equalized == ()


def test_damaged_equalization_is_refused(reference: torch.fx.GraphModule) -> None:
    values = reference_info(reference).to_dict()
    group = EqualizedLayers(("head",), None, "", "", 0.0, "")
    values["equalized"] = [{**asdict(group), "reason": 3}]

    with pytest.raises(TypeError, match="named by texts"):
        ReferenceInfo.from_dict(values)


def test_it_survives_json(reference: torch.fx.GraphModule) -> None:
    info = reference_info(reference)

    assert ReferenceInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_it_survives_a_copy(reference: torch.fx.GraphModule) -> None:
    assert reference_info(copy.deepcopy(reference)) == reference_info(reference)


def test_another_module_has_none() -> None:
    other = torch.fx.symbolic_trace(torch.nn.ReLU())

    assert find_reference_info(other) is None
    with pytest.raises(ModelFileError, match=r"versatil_core\.quantize"):
        reference_info(other)
