"""The promises about numbers; they need a machine that has the kernels."""

import functools
import json
from dataclasses import dataclass

import torch

from versatil_core._torch_compat import copy_graph_module, run_and_get_code
from versatil_core.audit import audit
from versatil_core.backend import BasePT2EBackend
from versatil_core.compile import compile  # noqa: A004 -- the verb
from versatil_core.conformance_case import ConformanceCase, Options, as_json
from versatil_core.conformance_models import ANY_BATCH, ModelCase, cached_reference
from versatil_core.conformance_process import changed, process_state, put_back_afterwards
from versatil_core.errors import InputError
from versatil_core.exactness import check_exactness
from versatil_core.int8_calls import int8_calls
from versatil_core.lower import lower
from versatil_core.signal_to_noise import sqnr_db

# Both run the same kernels. Inductor computes what is around them in another order, so that a
# value between two steps may round to the other one, which feeds the next layer.
_MIN_COMPILED_DB = 40.0


@dataclass(frozen=True)
class Compilation:
    """What came of compiling and running a model.

    Attributes:
        results: What it gave, for batches of two sizes.
        expected: What the lowered graph gives for them.
        code: The code that Inductor generated.
        changed: What of the process was not as before.
    """

    results: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor, ...]
    code: str
    changed: tuple[str, ...]


class KernelConformance(ConformanceCase):
    """Exactness and compilation."""

    def test_every_op_is_exact(self, options: Options, case: ModelCase) -> None:
        """Each int8 op gives what the reference defines, also beyond the calibrated range."""
        self.skip_without_kernels()
        backend = self.make_backend(options)
        reference = cached_reference(self.backend_class, as_json(options), case)
        lowered = lower(reference, backend)
        for x in (case.example(), case.unseen()):
            check_exactness(reference, lowered, (x,)).raise_if_inexact()

    def test_compiled_is_int8(self, options: Options) -> None:
        """Inductor calls an int8 kernel for each layer that the audit names one for."""
        self.skip_without_kernels()
        reference = cached_reference(self.backend_class, as_json(options), ANY_BATCH)
        wanted = audit(reference, self.make_backend(options)).kernel_call_count
        found = int8_calls(self._compiled(options).code)
        assert found == wanted, (
            f"the audit says that {wanted} layers are int8, but the compiled code calls "
            f"{found} int8 kernels"
        )

    def test_compiled_gives_what_lowered_gives(self, options: Options) -> None:
        """For batches of any size that the model takes."""
        self.skip_without_kernels()
        compiled = self._compiled(options)
        for result, expected in zip(compiled.results, compiled.expected, strict=True):
            db = sqnr_db(result, expected)
            assert db >= _MIN_COMPILED_DB, (
                f"the compiled model is {db:.1f} dB from the lowered one for a batch of "
                f"{len(result)}; at least {_MIN_COMPILED_DB:.0f} dB is the same computation"
            )

    def test_compiling_changes_nothing(self, options: Options) -> None:
        """Nothing of the process, neither by compiling nor by a call that fails."""
        self.skip_without_kernels()
        found = self._compiled(options).changed
        assert not found, f"lowering, compiling or running changes {', '.join(found)}"

    def _compiled(self, options: Options) -> Compilation:
        return _compilation(self.backend_class, as_json(options))


@functools.lru_cache(maxsize=8)
def _compilation(backend_class: type[BasePT2EBackend], options: str) -> Compilation:
    """Compile one model, since compiling takes seconds, and note all that tests ask for."""
    backend = backend_class(**json.loads(options))
    reference = cached_reference(backend_class, options, ANY_BATCH)
    batches = ANY_BATCH.unseen(), ANY_BATCH.example()
    try:
        with put_back_afterwards():
            before = process_state(with_patterns=False)
            lowered = lower(reference, backend)
            model = compile(copy_graph_module(reference), backend)
            results, codes = run_and_get_code(lambda: [model(x) for x in batches])
            _call_wrongly(model)
            found = changed(before, process_state(with_patterns=False))
    finally:
        torch.compiler.reset()  # a later compilation of the user's tests must not count ours
    expected = tuple(lowered(x) for x in batches)
    return Compilation(tuple(results), expected, "\n".join(codes), tuple(found))


def _call_wrongly(model: torch.nn.Module) -> None:
    try:
        model(ANY_BATCH.example()[:, :1])
    except InputError:
        return
    raise AssertionError("a compiled model accepts an input of the wrong shape")
