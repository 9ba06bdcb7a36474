"""A backend that keeps the contract, and others that each break one; importable by a new interpreter, too."""

import contextlib
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from versatil_core import BasePT2EBackend, InductorSettings, PinnedSetting
from versatil_core.compile import inductor_values
from versatil_core.environment import environment_variables, set_environment_variables
from versatil_core.inductor_settings import INT8_SETTINGS
from versatil_passes import LoweringRules
from versatil_passes._torch_compat import patch_inductor_config

VARIABLE = "VERSATIL_TOY"
aten = torch.ops.aten


class ToyBackend(BasePT2EBackend):
    """Linears only, for which x86 and Arm both have kernels; 7-bit activations never saturate."""

    name = "toy"
    is_qat = False
    dtype = torch.uint8
    machine_types: tuple[str, ...] = ("x86_64", "amd64", "aarch64")
    ops = frozenset({"linear"})
    reason = "a variable that nothing else sets"
    has_kernel = staticmethod(lambda node: node.target is aten.linear.default)

    def __init__(self, is_dynamic: bool = False, level: int = 1) -> None:
        self.is_dynamic = is_dynamic
        self.level = level

    @property
    def inductor_settings(self) -> InductorSettings:
        variable = PinnedSetting(VARIABLE, "on", self.reason)
        return InductorSettings(INT8_SETTINGS.config, environment=(variable,))

    @property
    def lowering_rules(self) -> LoweringRules:
        return LoweringRules(self.machine_types, ops=self.ops)

    def create_quantizer(self, module_path: str = "") -> Any:
        from torchao.quantization import pt2e
        from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

        from versatil_core.layer_quantizer import LayerQuantizer

        observer = pt2e.PlaceholderObserver if self.is_dynamic else pt2e.HistogramObserver
        activation = QuantizationSpec(
            dtype=self.dtype,
            quant_min=0,
            quant_max=127,
            qscheme=torch.per_tensor_affine,
            is_dynamic=self.is_dynamic,
            observer_or_fake_quant_ctr=observer,
        )
        weight = QuantizationSpec(
            dtype=torch.int8,
            quant_min=-127,
            quant_max=127,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
            observer_or_fake_quant_ctr=pt2e.PerChannelMinMaxObserver,
        )
        return LayerQuantizer(
            QuantizationConfig(activation, activation, weight, None, is_qat=False),
            module_path,
            is_dynamic=self.is_dynamic,
            has_kernel=self.has_kernel,
            kernels_write_int8=False,
        )


class UnregisteredBackend(ToyBackend):
    """Its entry point leads to another class."""


class ForgetfulBackend(ToyBackend):
    """An option has no attribute."""

    def __init__(self, is_dynamic: bool = False, width: int = 1) -> None:
        super().__init__(is_dynamic, level=width)


class NotJSONBackend(ToyBackend):
    """An option is no JSON value."""

    def __init__(self, is_dynamic: bool = False, level: Any = ()) -> None:
        super().__init__(is_dynamic, level={*level})  # type: ignore[arg-type]


class TupleBackend(ToyBackend):
    """An option is another JSON value than it was."""

    def __init__(self, is_dynamic: bool = False, level: Any = ()) -> None:
        super().__init__(is_dynamic, level=tuple(level))  # type: ignore[arg-type]


class CountingBackend(ToyBackend):
    """An equal backend cannot be made from an option."""

    def __init__(self, is_dynamic: bool = False, level: int = 1) -> None:
        super().__init__(is_dynamic, level + 1)


class DeafBackend(ToyBackend):
    """An option is taken, and not obeyed."""

    def __init__(self, is_dynamic: bool = False) -> None:
        super().__init__(is_dynamic and False)


class MuteBackend(ToyBackend):
    """Its repr tells nothing."""

    def __repr__(self) -> str:
        return "ToyBackend"


class NamelessBackend(ToyBackend):
    """Its repr doesn't tell the class."""

    def __repr__(self) -> str:
        return super().__repr__().removeprefix(type(self).__name__)


class NoReasonBackend(ToyBackend):
    """A value is pinned for no reason."""

    reason = "needed"


class UpperCaseBackend(ToyBackend):
    """A machine type that matches nowhere."""

    machine_types = ("x86_64", "AMD64", "aarch64")


class NoMachineBackend(ToyBackend):
    """No machine type at all."""

    machine_types = ()


class NoOpBackend(ToyBackend):
    """Nothing may be int8."""

    ops = frozenset[str]()


class FickleBackend(ToyBackend):
    """Rules that change."""

    @property
    def lowering_rules(self) -> LoweringRules:
        self.columns = getattr(self, "columns", 0) + 1
        return LoweringRules(self.machine_types, ops=self.ops, columns_bytes_max=self.columns)


class OwnContextBackend(ToyBackend):
    """A context of its own, with a part left out."""

    def environment_context(self) -> AbstractContextManager[None]:
        return self.context()

    def passes(self) -> AbstractContextManager[Any]:
        """Set Inductor's values, and restore them."""
        return patch_inductor_config(dict(inductor_values(self)))

    @contextmanager
    def context(self) -> Iterator[None]:
        """Set everything, restore everything."""
        with environment_variables({VARIABLE: "on"}), self.passes():
            yield


class NoPassBackend(OwnContextBackend):
    """The context pins values, and forgets the passes."""

    def passes(self) -> AbstractContextManager[Any]:
        return patch_inductor_config(self.inductor_settings.config_values())


class DroppingBackend(OwnContextBackend):
    """The context takes a variable from a user who had set it."""

    @contextmanager
    def context(self) -> Iterator[None]:
        with super().context():
            yield
        if VARIABLE in os.environ and os.environ[VARIABLE] != "on":
            del os.environ[VARIABLE]


class NoFinallyBackend(OwnContextBackend):
    """After an exception a variable is not restored."""

    @contextmanager
    def context(self) -> Iterator[None]:
        with super().context():
            try:
                yield
            except Exception:
                set_environment_variables({VARIABLE: "on"})
                raise


class SwallowingBackend(OwnContextBackend):
    """The context swallows exceptions."""

    @contextmanager
    def context(self) -> Iterator[None]:
        with super().context(), contextlib.suppress(Exception):
            yield


class NotNestingBackend(OwnContextBackend):
    """The end of an inner context is the end of the outer one, too."""

    depth = threading.local()

    @contextmanager
    def context(self) -> Iterator[None]:
        if getattr(self.depth, "is_inside", False):
            yield
            os.environ.pop(VARIABLE)
            return
        self.depth.is_inside = True
        try:
            with super().context():
                yield
        finally:
            self.depth.is_inside = False


class OneThreadBackend(OwnContextBackend):
    """Two threads overwrite what the other remembers."""

    @contextmanager
    def context(self) -> Iterator[None]:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "on"
        try:
            with self.passes():
                yield
        finally:
            os.environ.pop(VARIABLE, None)
            if before is not None:
                os.environ[VARIABLE] = before


class IdleBackend(ToyBackend):
    """Activating does nothing."""

    def activate_environment(self) -> None:
        pass


class QuantizerBackend(ToyBackend):
    """Its quantizer does what a function makes of the plain one."""

    def create_quantizer(self, module_path: str = "") -> Any:
        return self.changed(super().create_quantizer(module_path), module_path)

    def changed(self, quantizer: Any, module_path: str) -> Any:
        """Return another quantizer."""
        raise NotImplementedError

    def with_transform(self, quantizer: Any, transform: Callable[[GraphModule], None]) -> Any:
        """Let the quantizer change the graph before it annotates."""

        def transformed(model: GraphModule) -> GraphModule:
            transform(model)
            model.recompile()
            return model

        quantizer.transform_for_annotation = transformed
        return quantizer


class PrefixBackend(QuantizerBackend):
    """Takes whatever begins with ``layer1`` for a part of it: all there is."""

    def changed(self, quantizer: Any, module_path: str) -> Any:
        quantizer.module_path = module_path.removesuffix("layer1")
        return quantizer


class NothingBackend(QuantizerBackend):
    """Finds nothing in a submodule."""

    def changed(self, quantizer: Any, module_path: str) -> Any:
        quantizer.has_kernel = lambda _: not module_path
        return quantizer


class DuckBackend(QuantizerBackend):
    """Its quantizer only quacks like one of torchao's."""

    def changed(self, quantizer: Any, module_path: str) -> Any:  # noqa: ARG002 -- as in the base
        names = ("annotate", "validate", "transform_for_annotation", "prepare_obs_or_fq_callback")
        return SimpleNamespace(**{name: getattr(quantizer, name) for name in names})


class UntrainableBackend(ToyBackend):
    """Has the option, and the same quantizer with it."""

    def __init__(self, is_dynamic: bool = False, is_qat: bool = False) -> None:
        super().__init__(is_dynamic)
        self.is_qat = is_qat


class LosingBackend(QuantizerBackend):
    """One layer becomes operators that nobody can trace back to it."""

    def changed(self, quantizer: Any, module_path: str) -> Any:  # noqa: ARG002 -- as in the base
        return self.with_transform(quantizer, _take_apart_last_linear)


class WrongDtypeBackend(ToyBackend):
    """The quantizer makes what the rules don't admit."""

    dtype = torch.int8


class ModulesOnlyBackend(ToyBackend):
    """Its quantizer goes by the names of weights."""

    has_kernel = staticmethod(lambda node: str(node.args[1].target).endswith("weight"))


class UnsavableBackend(QuantizerBackend):
    """Its graphs hold a function that cannot be exported."""

    def changed(self, quantizer: Any, module_path: str) -> Any:  # noqa: ARG002 -- as in the base
        return self.with_transform(quantizer, _call_python_at_the_end)


class LeakingBackend(ToyBackend):
    """Making a quantizer leaves something in the environment."""

    def create_quantizer(self, module_path: str = "") -> Any:
        os.environ["VERSATIL_TOY_CALLS"] = os.environ.get("VERSATIL_TOY_CALLS", "") + "1"
        return super().create_quantizer(module_path)


class AnyMachineBackend(ToyBackend):
    """Claims to have kernels wherever it is."""

    @property
    def lowering_rules(self) -> LoweringRules:
        return LoweringRules((platform.machine().lower(),), ops=self.ops)


class AnyDeviceBackend(ToyBackend):
    """Claims to read tensors that it cannot read."""

    supported_device_types = ("cpu", "meta")


def _take_apart_last_linear(model: GraphModule) -> None:
    *others, layer = model.graph.find_nodes(op="call_function", target=aten.linear.default)
    if len(others) <= 1:
        return  # of the smaller models, nothing would be left
    x, weight, bias = layer.args
    with model.graph.inserting_before(layer):
        product = model.graph.call_function(
            aten.matmul.default, (x, model.graph.call_function(aten.t.default, (weight,)))
        )
        _replace(layer, model.graph.call_function(aten.add.Tensor, (product, bias)))
    model.graph.erase_node(layer)


def _call_python_at_the_end(model: GraphModule) -> None:
    *_, layer = model.graph.find_nodes(op="call_function", target=aten.linear.default)
    with model.graph.inserting_after(layer):
        called = model.graph.call_function(through_numpy, (layer,))
    _replace(layer, called)
    called.args = (layer,)


def _replace(node: Node, other: Node) -> None:
    other.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(other)


def through_numpy(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``; nothing can trace how."""
    if torch.compiler.is_exporting():
        raise NotImplementedError
    return x
