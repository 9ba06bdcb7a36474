"""The promises about what is quantized; no kernel runs, so they hold on every machine."""

import importlib
import inspect
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest, mock

import torch
from torch.fx import GraphModule, Node

from versatil_core.annotations import ANNOTATION
from versatil_core.audit import LayerAudit, audit
from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.compile import compile  # noqa: A004 -- the verb
from versatil_core.conformance_case import ConformanceCase, Options, as_json
from versatil_core.conformance_models import (
    ANY_BATCH,
    CASES,
    LINEARS,
    PRODUCTS,
    SIBLINGS,
    ModelCase,
    cached_reference,
    layer_paths,
)
from versatil_core.conformance_process import changed, process_state, put_back_afterwards
from versatil_core.errors import UnsupportedDeviceError, UnsupportedHostError, VersatilError
from versatil_core.lower import lower
from versatil_core.module_scope import is_node_inside
from versatil_core.quantize import quantize
from versatil_core.reference_info import reference_info
from versatil_core.saved_reference import load, save

_OBSERVER = "activation_post_process"  # the name torchao gives what it inserts
_PRODUCTS = 15  # five by hand, four of the attention, four of the layer, and two modules
_NO_MACHINE = "imaginary"


class LayerConformance(ConformanceCase):
    """The quantizer, the audit, saved models, and what is refused."""

    def reference(self, options: Options, case: ModelCase) -> GraphModule:
        """Return the reference of a model, which several tests share."""
        return cached_reference(self.backend_class, as_json(options), case)

    def test_quantizer_marks_its_module_only(self, options: Options) -> None:
        """``layer1`` is not ``layer10``."""
        for path, sibling in (("layer1", "layer10"), ("layer10", "layer1")):
            marked = _annotated(
                _exported(SIBLINGS), self.make_backend(options).create_quantizer(path)
            )
            outside = [node.name for node in marked if not is_node_inside(node, path)]
            assert marked, f"create_quantizer({path!r}) annotates nothing"
            assert not outside, (
                f"create_quantizer({path!r}) also annotates {', '.join(outside)}, which are "
                f"not in {path!r} but in {sibling!r}"
            )

    def test_quantizers_compose(self, options: Options) -> None:
        """Two of them do their work in one ``ComposableQuantizer``."""
        quantizers = importlib.import_module("torchao.quantization.pt2e.quantizer")
        paths = ("layer1", "layer10")
        parts = [self.make_backend(options).create_quantizer(path) for path in paths]
        for part in parts:
            assert isinstance(part, quantizers.Quantizer), f"{part!r} is no torchao Quantizer"
        marked = _annotated(_exported(SIBLINGS), quantizers.ComposableQuantizer(parts))
        for path in paths:
            assert any(is_node_inside(node, path) for node in marked), (
                f"two quantizers in a ComposableQuantizer annotate nothing in {path!r}"
            )

    def test_training_inserts_fake_quantization(self) -> None:
        """With ``is_qat``, the model that ``prepare_qat_pt2e`` makes rounds as int8 does."""
        if "is_qat" not in inspect.signature(self.backend_class).parameters:
            raise SkipTest(f"{self.backend_class.__name__} has no option is_qat")
        pt2e = importlib.import_module("torchao.quantization.pt2e")
        prepare = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
        quantizer = self.make_backend({"is_qat": True}).create_quantizer()
        prepared = prepare.prepare_qat_pt2e(_exported(SIBLINGS), quantizer)
        observers = {
            type(module) for name, module in prepared.named_children() if name.startswith(_OBSERVER)
        }
        plain = [kind.__name__ for kind in observers if not issubclass(kind, pt2e.FakeQuantizeBase)]
        assert observers, "with is_qat=True, nothing is inserted"
        assert not plain, f"with is_qat=True, {', '.join(plain)} is inserted: no fake quantization"

    def test_every_layer_is_accounted_for(self, options: Options, case: ModelCase) -> None:
        """Each linear and convolution is in the audit: int8 with a kernel, or float with a reason."""
        found = audit(self.reference(options, case), self.make_backend(options))
        paths = {layer.module_path for layer in found.layers}
        missing = sorted(layer_paths(case.model()).keys() - paths)
        assert not missing, f"the audit lacks {', '.join(missing)}; it has {', '.join(paths)}"
        for layer in found.layers:
            said = layer.kernel if layer.is_int8 else layer.reason
            assert said, f"the audit gives neither kernel nor reason for {layer.module_path}"

    def test_a_product_with_a_weight_is_a_linear(self, options: Options) -> None:
        """In whatever form it is written, and in both modes of ``torch.export``."""
        backend = self.make_backend(options)
        if "linear" not in backend.lowering_rules.ops:
            raise SkipTest(f"{self.backend_class.__name__} has no kernel for linears")
        for strict in (False, True):
            layers = audit(PRODUCTS.quantize(backend, strict=strict), backend).layers
            linears = [layer for layer in layers if layer.op == "linear"]
            reasons = {layer.reason for layer in linears if not layer.is_int8}
            assert len(linears) == _PRODUCTS, (
                f"of {_PRODUCTS} products, strict={strict} export makes {len(linears)} linears"
            )
            assert not reasons, (
                f"strict={strict}: a linear stays float: {'; '.join(map(str, reasons))}"
            )

    def test_each_kernel_is_reached(self, options: Options) -> None:
        """What the rules promise to run as int8 is quantized in a form that they admit."""
        backend = self.make_backend(options)
        rules = backend.lowering_rules
        layers = self._audited_layers(options)
        for op in sorted(rules.ops & rules.dynamic_ops if backend.is_dynamic else rules.ops):
            those = [layer for layer in layers if layer.op == op]
            reasons = {layer.reason for layer in those}
            assert any(layer.is_int8 for layer in those), (
                f"the rules admit {op}, but {backend!r} makes none of {len(those)} int8: "
                f"{'; '.join(filter(None, reasons))}"
            )

    def _audited_layers(self, options: Options) -> list[LayerAudit]:
        backend = self.make_backend(options)
        audits = [audit(self.reference(options, case), backend) for case in CASES]
        return [layer for found in audits for layer in found.layers]

    def test_a_saved_model_is_the_same(self, options: Options, tmp_path: Path) -> None:
        """It gives the same numbers, has the same kernels, and names the backend it is for."""
        backend, reference = self.make_backend(options), self.reference(options, ANY_BATCH)
        save(reference, tmp_path / "model.pt2")
        loaded = load(tmp_path / "model.pt2")
        x = ANY_BATCH.unseen()
        assert torch.equal(loaded(x), reference(x)), "a loaded model gives other numbers"
        before, after = (audit(module, backend).layers for module in (reference, loaded))
        assert [layer.kernel for layer in after] == [layer.kernel for layer in before], (
            "a loaded model has other kernels"
        )
        [target] = reference_info(loaded).targets
        assert (target.backend, target.options) == (backend.name, backend_options(backend)), (
            f"a loaded model is for {target.backend!r} with {target.options}, not for {backend!r}"
        )

    def test_quantizing_changes_nothing(self, options: Options) -> None:
        """Neither the process nor the model, also where calibration fails."""
        backend, model = self.make_backend(options), LINEARS.model()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.reference(options, LINEARS)  # torch and torchao are imported, whatever that does
        with put_back_afterwards():
            before = process_state()
            quantize(model, LINEARS.example(), backend, [LINEARS.example()])
            _fail_to_calibrate(model, backend)
            found = changed(before, process_state())
        assert not found, f"quantizing changes {', '.join(found)}"
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights[name]), f"quantizing changes the model's {name}"

    def test_another_machine_is_refused(self, options: Options) -> None:
        """Without the kernels, quantizing works, and lowering and compiling say at once that they don't."""
        with mock.patch.object(platform, "machine", return_value=_NO_MACHINE):
            backend = self.make_backend(options)
            reference = ANY_BATCH.quantize(backend)
            audit(reference, backend)
            for verb in (lower, compile):
                found = _refused_machine(verb, reference, backend)
                assert found == _NO_MACHINE, (
                    f"{verb.__name__} on the machine {_NO_MACHINE!r}: the error names {found}; list "
                    f"the machines that have the kernels in lowering_rules.machine_types"
                )

    def test_another_device_is_refused(self, options: Options) -> None:
        """A tensor that the kernels cannot read is named before anything is done."""
        backend = self.make_backend(options)
        x = LINEARS.example()
        try:
            quantize(LINEARS.model().to("meta"), x, backend, [x])
        except UnsupportedDeviceError as error:
            found = error.device_type
        except VersatilError as error:
            found = f"none, but says: {error}"
        else:
            found = "none, for there is none"
        assert found == "meta", (
            f"a model on the device 'meta', which holds no data: the error names {found}; "
            f"supported_device_types is {backend.supported_device_types}"
        )


def _refused_machine(
    verb: Callable[..., object], reference: GraphModule, backend: BasePT2EBackend
) -> str:
    """Return the machine that an error names, or say that there was no error."""
    try:
        verb(reference, backend)
    except UnsupportedHostError as error:
        return error.machine
    return "none, for there is none"


def _exported(case: ModelCase) -> Any:
    return torch.export.export(case.model(), (case.example(),)).module()


def _annotated(exported: GraphModule, quantizer: Any) -> list[Node]:
    """Return the nodes that a quantizer annotates, called as ``prepare_pt2e`` calls it."""
    annotated = quantizer.annotate(quantizer.transform_for_annotation(exported))
    return [node for node in annotated.graph.nodes if node.meta.get(ANNOTATION) is not None]


class _BadDataError(Exception):
    """Raised by the data, not by the model."""


def _fail_to_calibrate(model: torch.nn.Module, backend: BasePT2EBackend) -> None:
    def batches() -> Any:
        yield LINEARS.example()
        raise _BadDataError

    try:
        quantize(model, LINEARS.example(), backend, batches())
    except _BadDataError:
        return
    raise AssertionError("quantize() swallows what calibration data raise")
