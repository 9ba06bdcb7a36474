"""Imports torchao's Inductor quantizers without what their import does to Inductor.

Importing ``x86_inductor_quantizer`` or ``arm_inductor_quantizer`` assigns
``torch._inductor.config.pre_grad_custom_pass``, dropping the pass that a user had there, and
registers patterns and lowerings, all for the whole process. The modules imported here are
private copies, so whoever imports torchao's quantizer in the ordinary way still gets the
ordinary effects.
"""

import contextvars
import importlib
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from versatil_core._torch_compat import keep_pre_grad_pass

_QUANTIZERS = "torchao.quantization.pt2e.quantizer"
# What the quantizer modules register with Inductor comes from these two.
_REGISTERING = (
    "torchao.quantization.pt2e.inductor_passes.x86",
    "torchao.quantization.pt2e.inductor_passes.lowering",
)
_lock = threading.RLock()
_copies: dict[str, ModuleType] = {}


def load_quantizer_module(name: str) -> ModuleType:
    """Import one of torchao's quantizer modules and leave Inductor as it is.

    Args:
        name: For instance ``"x86_inductor_quantizer"``.

    Returns:
        The module that is already imported, if any; else a private copy of it.

    Raises:
        ImportError: torchao has no such module.
    """
    full_name = f"{_QUANTIZERS}.{name}"
    with _lock:
        if full_name in sys.modules:
            return sys.modules[full_name]
        if full_name not in _copies:
            # From torch 2.12 on, what is assigned in a copied context stays in it.
            contextvars.copy_context().run(_import_copy, full_name)
        return _copies[full_name]


def _import_copy(full_name: str) -> None:
    package = importlib.import_module(_QUANTIZERS)
    before = set(sys.modules)
    stand_ins = {module: _Inert(module) for module in _REGISTERING}
    copies = {module: copy for module, copy in _copies.items() if module not in before}
    try:
        with keep_pre_grad_pass(), _modules_in_place(stand_ins | copies):
            importlib.import_module(full_name)
    finally:
        for module in set(sys.modules) - before:
            if module.startswith(_QUANTIZERS + "."):
                _copies[module] = sys.modules.pop(module)
                # `import a.b` also makes b an attribute of a.
                package.__dict__.pop(module.rpartition(".")[2], None)


class _Inert(ModuleType):
    """Stands in for a module whose functions register something: they do nothing here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


@contextmanager
def _modules_in_place(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    replaced = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in replaced.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
