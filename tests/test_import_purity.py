"""Importing one of our packages changes nothing that belongs to the process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunPython

# The snapshot needs Inductor, so that is imported first, with the modules in
# which patterns are registered; what they do on import is torch's own affair.
SNAPSHOT = """
import gc, json, logging, os, sys, warnings
import torch
import torch._dynamo.config
import torch._inductor.config
import torch._inductor.fx_passes.freezing_patterns
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
import torch._inductor.fx_passes.pre_grad
from torch._inductor.pattern_matcher import PatternMatcherPass


def snapshot():
    tables = [table for table in gc.get_objects() if type(table) is PatternMatcherPass]
    root = logging.getLogger()
    return {
        "inductor": repr(torch._inductor.config.get_config_copy()),
        "dynamo": repr(torch._dynamo.config.get_config_copy()),
        "environment": dict(os.environ),
        "logger": [root.level, list(map(repr, root.handlers))],
        "patterns": sum(len(found) for t in tables for found in t.patterns.values()),
        "threads": torch.get_num_threads(),
        "warnings": list(map(repr, warnings.filters)),
    }


before = snapshot()
{statement}
after = snapshot()
print(json.dumps(sorted(name for name in before if before[name] != after[name])))
"""

OFFENCES = {
    "inductor": "torch._inductor.config.freezing = not torch._inductor.config.freezing",
    "dynamo": "torch._dynamo.config.suppress_errors = True",
    "environment": "os.environ['CUDA_VISIBLE_DEVICES'] = ''",
    "logger": "logging.basicConfig()",
    "threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "warnings": "warnings.simplefilter('ignore')",
}


def changed(run_python: RunPython, statement: str) -> list[str]:
    """Return what the statement changes in a new process."""
    result = run_python(SNAPSHOT.replace("{statement}", statement))
    names = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(names, list)
    return names


@pytest.mark.parametrize(
    "package", ["versatil_passes", "versatil_core", "versatil_x86", "versatil_arm"]
)
def test_import_changes_nothing(run_python: RunPython, package: str) -> None:
    assert changed(run_python, f"import {package}") == []


@pytest.mark.parametrize("what", OFFENCES)
def test_the_snapshot_notices_a_change(run_python: RunPython, what: str) -> None:
    assert changed(run_python, OFFENCES[what]) == [what]


def test_the_snapshot_notices_what_torchao_does(run_python: RunPython) -> None:
    """The import that made this test necessary: it fills a pass slot and pattern tables."""
    module = "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"

    assert {"inductor", "patterns"} <= set(changed(run_python, f"import {module}"))


@pytest.mark.parametrize("backend", ["versatil_x86.X86", "versatil_arm.Arm"])
def test_making_a_quantizer_changes_nothing(run_python: RunPython, backend: str) -> None:
    """Behind the import guard the same module leaves nothing behind."""
    package = backend.split(".", maxsplit=1)[0]
    statement = f"import {package}; {backend}InductorBackend().create_quantizer()"

    found = changed(run_python, statement)

    # torchao itself adds warning filters when it is imported; those are its own.
    assert set(found) <= {"warnings"}
