"""The contract has exactly the members of the design."""

from collections.abc import Callable
from typing import Any

import pytest

from versatil_core import BasePT2EBackend, backend_options


def test_public_members_are_those_of_the_design() -> None:
    names = {name for name in dir(BasePT2EBackend) if not name.startswith("_")}

    assert names | set(BasePT2EBackend.__annotations__) == {
        "name",
        "is_dynamic",
        "is_qat",
        "float_dtype",
        "supported_device_types",
        "cpu_features",
        "create_quantizer",
        "environment_context",
        "activate_environment",
        "inductor_settings",
        "lowering_rules",
        "option_reasons",
    }


def test_it_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BasePT2EBackend()  # type: ignore[abstract]


def test_options_make_an_equal_backend(linear_backend: Callable[..., Any]) -> None:
    backend = linear_backend(is_dynamic=True, quant_max=255)

    options = backend_options(backend)

    assert options == {"is_dynamic": True, "is_qat": False, "quant_max": 255}
    assert backend_options(linear_backend(**options)) == options
    assert backend.supported_device_types == ("cpu",)
    assert backend.option_reasons == {}
