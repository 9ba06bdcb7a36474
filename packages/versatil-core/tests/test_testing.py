"""The conformance suite passes a backend that keeps the contract, and notices each broken promise."""

import importlib
import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch

import versatil_core
from versatil_core import (
    InputError,
    conformance_kernels,
    quantize,
)
from versatil_core.conformance_contract import ContractConformance
from versatil_core.conformance_environment import EnvironmentConformance
from versatil_core.conformance_layers import LayerConformance
from versatil_core.conformance_models import CASES
from versatil_core.conformance_process import put_back_afterwards
from versatil_core.testing import KernelConformance, assert_exact
from versatil_passes import LoweringRules
from versatil_passes.int8_ops import is_int8_op

pytest_plugins = ["pytester"]

# They ask a new interpreter, which takes seconds.
IN_A_PROCESS = {"test_importing_changes_nothing", "test_activating_is_the_context_for_good"}
EQUAL, REPR = "test_options_make_an_equal_backend", "test_repr_shows_the_options"
PRODUCTS = "test_a_product_with_a_weight_is_a_linear"
REASON, RULES = "test_every_setting_has_a_reason", "test_rules_are_usable"

# Class in toy_backend.py -> the tests that must fail, and what the first of them says.
BROKEN = {
    ContractConformance: {
        "UnregisteredBackend": (
            ["test_its_name_is_registered"],
            "leads to <class 'toy_backend.Toy",
        ),
        "ForgetfulBackend": ([EQUAL, REPR, "test_its_name_is_registered"], "options width"),
        "NotJSONBackend": ([EQUAL], "no JSON values: Object of type set"),
        "TupleBackend": ([EQUAL], r"come back from JSON as .*\[\]"),
        "CountingBackend": ([EQUAL, "test_its_name_is_registered"], "'level': 3"),
        "DeafBackend": (["test_options_are_obeyed"], "is_dynamic is False with the options"),
        "MuteBackend": ([REPR], "lacks is_dynamic=False: ToyBackend"),
        "NamelessBackend": ([REPR], "begin with the class"),
        "NoReasonBackend": ([REASON], "VERSATIL_TOY = 'on' is 'needed'"),
        "UpperCaseBackend": ([RULES], "'AMD64' can never match"),
        "NoMachineBackend": ([RULES], "no machine type"),
        "NoOpBackend": ([RULES], "admit no operator: every layer"),
        "FickleBackend": ([RULES], "differ from one reading"),
    },
    EnvironmentConformance: {
        "NoPassBackend": (["test_context_sets_everything"], "no pass into .*pre_grad_custom_pass"),
        "DroppingBackend": (["test_context_restores_everything"], "os.environ.'VERSATIL_TOY'"),
        "NoFinallyBackend": (["test_context_restores_after_an_exception"], "left behind"),
        "SwallowingBackend": (["test_context_restores_after_an_exception"], "swallows"),
        "NotNestingBackend": (["test_contexts_nest"], "also ends VERSATIL_TOY"),
        "OneThreadBackend": (["test_threads_may_overlap"], "not {'VERSATIL_TOY': 'on'}"),
    },
    LayerConformance: {
        "PrefixBackend": (["test_quantizer_marks_its_module_only"], "'layer1'.* also annotates"),
        "DuckBackend": (["test_quantizers_compose"], "no torchao Quantizer"),
        "NothingBackend": (
            ["test_quantizer_marks_its_module_only", "test_quantizers_compose"],
            "annotates nothing",
        ),
        "UntrainableBackend": (
            ["test_training_inserts_fake_quantization"],
            "(HistogramObserver|PerChannelMinMaxObserver) is inserted",
        ),
        "LosingBackend": (
            ["test_every_layer_is_accounted_for", PRODUCTS],
            "the audit lacks head; it has",
        ),
        "WrongDtypeBackend": (
            ["test_each_kernel_is_reached", PRODUCTS],
            "makes none of [0-9]+ int8: .*int8",
        ),
        "ModulesOnlyBackend": (
            [PRODUCTS],
            "a linear stays float: its input is not quantized",
        ),
        "UnsavableBackend": (["test_a_saved_model_is_the_same"], ""),
        "LeakingBackend": (["test_quantizing_changes_nothing"], "VERSATIL_TOY_CALLS"),
        "AnyMachineBackend": (["test_another_machine_is_refused"], "the error names none"),
        "AnyDeviceBackend": (
            ["test_another_device_is_refused"],
            "holds no data: the error names none",
        ),
    },
}


@pytest.fixture(autouse=True)
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the toys, registered as if a distribution had been installed."""
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    register(tmp_path, "ToyBackend")
    with put_back_afterwards():
        yield importlib.import_module("toy_backend")
    torch._dynamo.reset()


def register(folder: Path, name: str, module: str = "toy_backend") -> None:
    text = f"[versatil.backends]\ntoy = {module}:{name}\n"
    (folder / "toy-1.0.dist-info" / "entry_points.txt").write_text(text, encoding="utf-8")


def suite_for(base: type[Any], backend: type[Any], **attributes: Any) -> Any:
    return type("TestToy", (base,), {"backend_class": backend, "option_sets": ({},)} | attributes)()


def failures(suite: Any, tmp_path: Path) -> dict[str, str]:
    """Run what pytest would run, all but what takes seconds; return test -> what it says."""
    found: dict[str, str] = {}
    for name, test in inspect.getmembers(suite, inspect.ismethod):
        if not name.startswith("test_") or name in IN_A_PROCESS:
            continue
        values = {"options": suite.option_sets, "case": CASES, "tmp_path": [tmp_path]}
        parameters = inspect.signature(test).parameters
        for arguments in itertools.product(*(values[parameter] for parameter in parameters)):
            try:
                with put_back_afterwards():
                    test(*arguments)
            except SkipTest:
                continue
            except Exception as error:  # noqa: BLE001 -- whatever pytest would report
                found.setdefault(name, f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize(
    ("base", "name"), [(base, name) for base, toys in BROKEN.items() for name in toys]
)
def test_a_broken_promise_fails_its_test(
    base: type[Any], name: str, toys: Any, tmp_path: Path
) -> None:
    wanted, message = BROKEN[base][name]
    register(tmp_path, "ToyBackend" if name == "UnregisteredBackend" else name)
    options = ({"is_dynamic": True},) if name == "DeafBackend" else ({},)

    found = failures(suite_for(base, getattr(toys, name), option_sets=options), tmp_path)

    assert found.keys() == {*wanted}, found
    assert re.search(message, found[wanted[0]]), found


def test_an_operator_that_only_static_models_reach(toys: Any) -> None:
    rules = LoweringRules(("x86_64",), ops=frozenset({"linear"}), dynamic_ops=frozenset())
    backend = type("Toy", (toys.ToyBackend,), {"lowering_rules": rules})

    with pytest.raises(AssertionError, match="admit no operator with a measured scale: every"):
        suite_for(ContractConformance, backend).test_rules_are_usable({"is_dynamic": True})


def test_every_promise_is_broken_once() -> None:
    """By a toy above, or in a test below."""
    tests = {name for base in BROKEN for name in dir(base) if name.startswith("test_")}
    broken = {name for toys in BROKEN.values() for wanted, _ in toys.values() for name in wanted}

    assert tests - broken == IN_A_PROCESS


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            (
                "import os, torchao.quantization.pt2e.quantizer.x86_inductor_quantizer\n"
                "os.environ['VERSATIL_LEFT'] = '1'"
            ),
            r"patterns, os.environ\['VERSATIL_LEFT'\], torch._inductor.config.pre_grad_custom_pass",
        ),
        ("import other_hardware", "also imported the hardware packages other_hardware"),
    ],
)
def test_an_import_that_is_noticed(code: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "other_hardware.py").touch()
    (tmp_path / "impure.py").write_text(f"from toy_backend import ToyBackend as Toy\n{code}\n")
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[versatil.backends]\nother = other_hardware:Other\n")
    # Only the new interpreter imports the module.
    backend = type("Toy", (importlib.import_module("toy_backend").ToyBackend,), {})
    backend.__module__ = "impure"

    with pytest.raises(AssertionError, match=message):
        suite_for(ContractConformance, backend).test_importing_changes_nothing()


def test_activating_that_does_nothing_is_noticed(toys: Any) -> None:
    suite = suite_for(EnvironmentConformance, toys.IdleBackend)

    with pytest.raises(AssertionError, match=r"differ in .*os.environ\['VERSATIL_TOY'\]"):
        suite.test_activating_is_the_context_for_good()


class Fake(torch.nn.Module):
    """Stands in for a compiled model; by itself it computes what the lowered one does, in float."""

    def __init__(self, reference: Any, _: Any) -> None:
        super().__init__()
        self.reference = reference

    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[1] != 3:
            raise InputError("the channels are 3")
        return self.reference(x)


class Shifted(Fake):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + 0.1


class Leaving(Fake):
    def forward(self, x: torch.Tensor) -> Any:
        torch._inductor.config.freezing = not torch._inductor.config.freezing
        return super().forward(x)


class Welcoming(Fake):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.expand(-1, 3, -1, -1))


@pytest.mark.parametrize(
    ("model", "test", "message"),
    [
        (Fake, "test_compiled_is_int8", "2 layers are int8, but the compiled code calls 0 int8"),
        (Shifted, "test_compiled_gives_what_lowered_gives", "dB from the lowered one for a batch"),
        (Leaving, "test_compiling_changes_nothing", "changes torch._inductor.config.freezing"),
        (Welcoming, "test_compiling_changes_nothing", "accepts an input of the wrong shape"),
    ],
)
def test_a_compilation_that_is_noticed(
    model: type[Fake], test: str, message: str, toys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance_kernels, "compile", model)
    suite = suite_for(KernelConformance, type("Toy", (toys.ToyBackend,), {}))

    with pytest.raises(AssertionError, match=message):
        getattr(suite, test)({})


def test_one_layer_without_its_kernel_is_noticed(
    toys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer of two, which has 4 outputs, keeps the neutral operator."""
    suite = suite_for(KernelConformance, type("Toy", (toys.ToyBackend,), {}))
    suite.test_compiled_is_int8({})
    monkeypatch.setattr(
        "versatil_passes.onednn_kernels.is_int8_op",
        lambda node: is_int8_op(node) and node.meta["val"].shape[-1] != 4,
    )
    suite = suite_for(KernelConformance, type("Toy", (toys.ToyBackend,), {}))

    with pytest.raises(AssertionError, match="2 layers are int8, but the compiled code calls 1 "):
        suite.test_compiled_is_int8({})


def lowered_wrongly(reference: Any, backend: Any) -> Any:
    """Lower, and take another scale for the activations of each layer."""
    lowered = versatil_core.lower(reference, backend)
    kernel = torch.ops.onednn.qlinear_pointwise.default
    for node in lowered.graph.find_nodes(op="call_function", target=kernel):
        node.update_arg(1, 1.1 * node.args[1])
    lowered.recompile()
    return lowered


def test_a_kernel_that_is_not_exact_is_noticed(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = suite_for(KernelConformance, type("Toy", (toys.ToyBackend,), {}))
    for case in CASES:
        suite.test_every_op_is_exact({}, case)
    monkeypatch.setattr(conformance_kernels, "lower", lowered_wrongly)

    with pytest.raises(AssertionError, match="ops are not exact"):
        suite.test_every_op_is_exact({}, CASES[0])


KERNEL_TESTS = [name for name in dir(KernelConformance) if name.startswith("test_")]


@pytest.mark.parametrize("test", KERNEL_TESTS)
def test_without_the_kernels_a_test_is_skipped_or_fails(
    test: str, toys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "Imaginary")
    arguments = [{}, CASES[0]] if "exact" in test else [{}]

    with pytest.raises(SkipTest, match=r"'toy' run on x86_64, .*; this machine is imaginary"):
        getattr(suite_for(KernelConformance, toys.ToyBackend), test)(*arguments)
    suite = suite_for(KernelConformance, toys.ToyBackend, must_run_kernels=True)
    with pytest.raises(AssertionError, match="must_run_kernels"):
        getattr(suite, test)(*arguments)


SUITE = """
from toy_backend import ToyBackend
from versatil_core.testing import BackendConformance

class TestConformance(BackendConformance):
    backend_class = ToyBackend
    option_sets = ({"is_dynamic": True},)
    must_run_kernels = True
"""


def test_a_backend_that_keeps_every_promise_passes(pytester: pytest.Pytester) -> None:
    """As in the tests of a hardware package: pytest finds the class."""
    pytester.makepyfile(test_conformance=SUITE)

    result = pytester.runpytest_inprocess("-v", "-rs", "-W", "ignore")

    result.assert_outcomes(passed=36, skipped=1)
    result.stdout.fnmatch_lines(["*ToyBackend has no option is_qat"])
    assert "test_every_op_is_exact[is_dynamic=True-any batch]" in result.stdout.str()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("backend_class = ToyBackend", "TestConformance.backend_class is None: set it to the"),
        ('option_sets = ({"is_dynamic": True},)', "TestConformance.option_sets is (): name one"),
    ],
)
def test_pytest_says_which_attribute_to_set(
    line: str, message: str, pytester: pytest.Pytester
) -> None:
    without = "option_sets = ()" if "option" in line else ""
    pytester.makepyfile(test_conformance=SUITE.replace(line, without))

    result = pytester.runpytest_inprocess("-W", "ignore")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*AssertionError: {message}*"])


def test_pytest_shows_why_kernels_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "imaginary")
    pytester.makepyfile(test_conformance=SUITE.replace("True", "False"))

    result = pytester.runpytest_inprocess("-rs", "-k", "compiled_is_int8", "-W", "ignore")

    result.assert_outcomes(skipped=1, deselected=36)
    result.stdout.fnmatch_lines(["*the kernels of 'toy' run on x86_64, *this machine is imaginary"])


def test_assert_exact(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, backend = torch.randn(2, 3, 4, 4), toys.ToyBackend()
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4), torch.nn.Flatten(), torch.nn.Linear(8, 4))
    reference = quantize(model, x, backend, [x])

    assert_exact(reference, backend, 3 * x)
    monkeypatch.setattr("versatil_core.testing.lower", lowered_wrongly)
    with pytest.raises(AssertionError, match=r"1 of \d ops are not exact"):
        assert_exact(reference, backend, x)


def test_importing_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import versatil_core.testing"

    subprocess.run([sys.executable, "-c", code], check=True)
