"""``assert_int8`` takes whatever runs as int8, and names what does not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from versatil_core import (
    Audit,
    PackagedModel,
    audit,
    compile,  # noqa: A004 -- the verb
    lower,
    quantize,
)
from versatil_core.testing import assert_int8


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 8, 1), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.conv(x).mean((2, 3)))


def test_assert_int8(linear_backend: Any) -> None:
    x, backend = torch.randn(2, 3, 4, 4), linear_backend()
    found = audit(quantize(Mixed(), x, backend, [x]), backend)

    assert_int8(found, min_layers=1)
    with pytest.raises(AssertionError, match=r"1 of 2 layers are int8, expected 2\n  conv: \w+"):
        assert_int8(found)
    with pytest.raises(AssertionError, match="expected 3"):
        assert_int8(found, min_layers=3)


def test_assert_int8_takes_models(linear_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, backend = torch.randn(2, 3, 4, 4), linear_backend()
    reference = quantize(Mixed(), x, backend, [x])
    audited = audit(reference, backend)
    package_info = SimpleNamespace(audit=audited.to_dict())
    packaged = PackagedModel.__new__(PackagedModel)
    torch.nn.Module.__init__(packaged)
    monkeypatch.setattr(packaged, "manifest", SimpleNamespace(package=package_info), raising=False)

    for model in (lower(reference, backend), compile(reference, backend), packaged):
        assert_int8(model, min_layers=1)
        with pytest.raises(
            AssertionError, match=r"1 of 2 layers are int8, expected 2\n  conv: \w+"
        ):
            assert_int8(model)


def test_assert_int8_of_what_is_no_int8_model(linear_backend: Any) -> None:
    x, backend = torch.randn(2, 3, 4, 4), linear_backend()
    with pytest.raises(TypeError, match="Mixed is no model that versatil made run as int8: pass"):
        assert_int8(Mixed())
    # A reference runs in float: whether its layers are int8 is a question to a backend.
    with pytest.raises(TypeError, match="pass what compile"):
        assert_int8(quantize(Mixed(), x, backend, [x]))


def test_a_model_without_layers_is_not_int8() -> None:
    with pytest.raises(AssertionError, match="0 of 0 layers are int8, expected 1"):
        assert_int8(Audit("toy", ()))
