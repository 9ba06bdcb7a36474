"""What belongs to the process, and what is asked of a backend in a process of its own.

``python -m versatil_core.conformance_process QUESTION MODULE CLASS OPTIONS`` answers in JSON.
"""

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from versatil_core._torch_compat import (
    inductor_config,
    load_inductor_patterns,
    pattern_count,
    set_inductor_config,
)
from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.discovery import installed_backends

State = dict[str, Any]


def process_state(*, with_patterns: bool = True) -> State:
    """Return what a backend must leave alone, by name.

    Args:
        with_patterns: Also count the patterns that are registered with Inductor. torch registers
            its own when it first compiles.
    """
    root = logging.getLogger()
    # Any torch.compile leaves the places of its caches, and an address, in variables of torch's own.
    variables = {name: value for name, value in os.environ.items() if "TORCHINDUCTOR" not in name}
    state: State = {f"os.environ[{name!r}]": value for name, value in variables.items()}
    state |= {f"torch._inductor.config.{name}": v for name, v in inductor_config().items()}
    state |= {
        "the root logger's handlers": [*map(repr, root.handlers)],
        "the root logger's level": root.level,
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's random state": torch.get_rng_state().tolist(),
    }
    return state | {"Inductor's patterns": pattern_count()} if with_patterns else state


def changed(before: State, after: State) -> list[str]:
    """Return the names whose values differ, or that are in one of the two only."""
    missing = object()
    names = sorted({*before, *after})
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]


@contextmanager
def put_back_afterwards() -> Iterator[None]:
    """Restore environment and Inductor's config, so that a bad backend fails its own test only."""
    before = inductor_config()
    with mock.patch.dict(os.environ):
        try:
            yield
        finally:
            now = inductor_config()
            set_inductor_config({name: v for name, v in before.items() if now[name] != v})


def ask(question: str, backend: BasePT2EBackend) -> Any:
    """Ask a new interpreter about a backend.

    Args:
        question: ``"import"`` or ``"activate"``: the function here of that name.
        backend: The backend; it must be importable by its module and class.

    Returns:
        The answer.
    """
    cls = type(backend)
    options = json.dumps(backend_options(backend))
    command = [sys.executable, "-m", __name__, question, cls.__module__, cls.__name__, options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(  # noqa: S603 -- this module, with the name of a class
        command, capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, f"{' '.join(command[2:])} failed:\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])


def what_importing_changes(module: str, name: str, options: State) -> dict[str, list[str]]:
    """Import a backend, use it as far as nothing compiles, and say what is not as before."""
    load_inductor_patterns()  # whatever that registers is torch's own affair
    before = process_state()
    backend = getattr(importlib.import_module(module), name)(**options)
    _ = backend.lowering_rules, backend.inductor_settings
    backend.create_quantizer("")
    own_package = module.partition(".")[0]
    foreign = {entry.entry_point.module.partition(".")[0] for entry in installed_backends()}
    return {
        "changed": changed(before, process_state()),
        "imported": sorted((foreign - {own_package}) & {*sys.modules}),
    }


def what_activating_misses(module: str, name: str, options: State) -> list[str]:
    """Return what the context sets and ``activate_environment`` does not, or otherwise."""
    backend = getattr(importlib.import_module(module), name)(**options)
    before = process_state(with_patterns=False)
    with backend.environment_context():
        inside = process_state(with_patterns=False)
    backend.activate_environment()
    after = process_state(with_patterns=False)
    by_context, by_activating = changed(before, inside), changed(before, after)
    pinned = {f"torch._inductor.config.{s.name}" for s in backend.inductor_settings.config}
    pinned |= {f"os.environ[{s.name!r}]" for s in backend.inductor_settings.environment}
    differing = {name for name in pinned if inside.get(name) != after.get(name)}
    return sorted(differing | ({*by_context} ^ {*by_activating}))


_QUESTIONS = {"import": what_importing_changes, "activate": what_activating_misses}

if __name__ == "__main__":
    _question, _module, _name, _options = sys.argv[1:]
    _answer = _QUESTIONS[_question](_module, _name, json.loads(_options))
    sys.stdout.write("\n" + json.dumps(_answer) + "\n")
