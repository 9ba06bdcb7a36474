"""The guard imports torchao's quantizers and leaves Inductor alone; each test in a new process."""

import subprocess
import sys

SNAPSHOT = """
import gc, sys, threading
import torch
import torch._inductor.config as config
import torch._inductor.fx_passes.freezing_patterns
import torch._inductor.fx_passes.post_grad
import torch._inductor.lowering as lowering
from torch._inductor.pattern_matcher import PatternMatcherPass

def mine(graph): pass
config.pre_grad_custom_pass = mine

def snapshot():
    tables = [table for table in gc.get_objects() if type(table) is PatternMatcherPass]
    values = config.get_config_copy()
    values.pop("pre_grad_custom_pass")  # a copy of it would look different each time
    return (
        repr(values),
        id(config.pre_grad_custom_pass),
        sum(len(found) for table in tables for found in table.patterns.values()),
        len(lowering.lowerings),
    )

QUANTIZER = "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"
"""


def run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SNAPSHOT + code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_nothing_is_left_behind() -> None:
    """Case 01."""
    run("""
import torchao.quantization.pt2e.quantizer as package
from versatil_core import load_quantizer_module
before = snapshot()
module = load_quantizer_module("x86_inductor_quantizer")
assert module.X86InductorQuantizer
assert load_quantizer_module("x86_inductor_quantizer") is module
assert snapshot() == before
assert config.pre_grad_custom_pass is mine
assert QUANTIZER not in sys.modules and not hasattr(package, "x86_inductor_quantizer")
assert "torchao.quantization.pt2e.inductor_passes.x86" not in sys.modules
""")


def test_the_arm_quantizer_shares_the_copy() -> None:
    run("""
from versatil_core import load_quantizer_module
import torchao.quantization.pt2e
before = snapshot()
x86 = load_quantizer_module("x86_inductor_quantizer")
arm = load_quantizer_module("arm_inductor_quantizer")
assert issubclass(arm.ArmInductorQuantizer, x86.X86InductorQuantizer)
assert snapshot() == before
""")


def test_an_ordinary_import_afterwards_is_ordinary() -> None:
    """Case 28: who imports torchao's quantizer for its patterns still gets them."""
    run("""
import importlib
from versatil_core import load_quantizer_module
copy = load_quantizer_module("x86_inductor_quantizer")
before = snapshot()
ordinary = importlib.import_module(QUANTIZER)
assert ordinary is not copy
assert snapshot()[2] > before[2]
assert config.pre_grad_custom_pass is not mine
assert load_quantizer_module("x86_inductor_quantizer") is ordinary
""")


def test_a_module_that_is_there_already_is_used() -> None:
    run("""
import importlib
from versatil_core import load_quantizer_module
ordinary = importlib.import_module(QUANTIZER)
after = snapshot()
assert load_quantizer_module("x86_inductor_quantizer") is ordinary
assert load_quantizer_module("arm_inductor_quantizer").X86InductorQuantizer is ordinary.X86InductorQuantizer
assert snapshot() == after
""")


def test_another_thread_sees_nothing_meanwhile() -> None:
    run("""
import torchao.quantization.pt2e
from versatil_core import load_quantizer_module
table = torch._inductor.fx_passes.freezing_patterns.pass_patterns
count = lambda: sum(len(found) for t in table for found in t.patterns.values())
before, seen, stop = count(), set(), threading.Event()
def watch():
    while not stop.is_set():
        seen.add(count())
thread = threading.Thread(target=watch)
thread.start()
load_quantizer_module("x86_inductor_quantizer")
stop.set()
thread.join()
assert seen == {before}, seen
""")


def test_an_unknown_module_is_an_import_error_and_leaves_nothing() -> None:
    run("""
from versatil_core import load_quantizer_module
import torchao.quantization.pt2e
before = snapshot()
try:
    load_quantizer_module("no_such_quantizer")
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("no error")
assert snapshot() == before
assert "torchao.quantization.pt2e.inductor_passes.x86" not in sys.modules
""")
