"""Which float layers `versatil inspect --require-int8` objects to."""

import pytest

from versatil_core.audit import Audit, LayerAudit
from versatil_core.errors import TargetError
from versatil_core.excluded_layers import float_layers_outside


def layer(path: str, *, is_int8: bool, node: str = "node") -> LayerAudit:
    reason = None if is_int8 else "because"
    return LayerAudit(path, "linear", node, is_int8, None, (), None, reason)


AUDIT = Audit(
    "fake",
    (
        layer("encoder.0.dense", is_int8=True),
        layer("encoder.1.dense", is_int8=False),
        layer("encoder.10", is_int8=False),
        layer("", is_int8=False, node="matmul_3"),
    ),
)


@pytest.mark.parametrize(
    ("excluded", "left"),
    [
        ((), ["encoder.1.dense", "encoder.10", ""]),
        (("encoder.1",), ["encoder.10", ""]),  # and not encoder.10
        (("encoder",), [""]),
        (("encoder", "matmul_3"), []),
        (("encoder.0.dense",), ["encoder.1.dense", "encoder.10", ""]),
    ],
)
def test_float_layers_outside(excluded: tuple[str, ...], left: list[str]) -> None:
    assert [found.module_path for found in float_layers_outside(AUDIT.layers, excluded)] == left


def test_an_excluded_path_without_a_layer_is_an_error() -> None:
    with pytest.raises(TargetError, match=r"--exclude encoder.2.*did you mean 'encoder") as caught:
        float_layers_outside(AUDIT.layers, ["encoder", "encoder.2"])
    assert caught.value.module_paths == ("encoder.2",)
    assert "encoder.1" in caught.value.suggestions


def test_nothing_similar_gives_no_hint() -> None:
    with pytest.raises(TargetError, match=r"no layer has this path$"):
        float_layers_outside(AUDIT.layers, ["zzz"])
