"""The promises that a backend keeps before it quantizes anything."""

import inspect
import json

from versatil_core._torch_compat import inductor_config
from versatil_core.backend import BasePT2EBackend, backend_options
from versatil_core.conformance_case import ConformanceCase, Options
from versatil_core.conformance_process import ask
from versatil_core.discovery import ENTRY_POINT_GROUP, create_backend, load_backend
from versatil_passes import Int8Lowering
from versatil_passes.lowering_rules import LoweringRules

_MIN_WORDS = 3  # fewer are no reason


class ContractConformance(ConformanceCase):
    """Name, options, settings and rules."""

    def test_its_name_is_registered(self) -> None:
        """The entry point of that name leads to this class, and to an equal backend."""
        backend = self.make_backend()
        loaded = load_backend(backend.name)
        assert loaded is self.backend_class, (
            f"the entry point {backend.name!r} of the group {ENTRY_POINT_GROUP!r} leads to "
            f"{loaded!r}, not to {self.backend_class!r}: correct pyproject.toml, and install anew"
        )
        again = create_backend(backend.name, backend_options(backend))
        assert repr(again) == repr(backend), f"create_backend made {again!r} of {backend!r}"

    def test_options_make_an_equal_backend(self, options: Options) -> None:
        """Each option is an attribute and a JSON value, as a saved model keeps it."""
        backend = self.make_backend(options)
        parameters = inspect.signature(self.backend_class).parameters
        missing = [name for name in parameters if not hasattr(backend, name)]
        assert not missing, (
            f"{self.backend_class.__name__} keeps no attribute of the same name for the "
            f"options {', '.join(missing)}: a saved model could not name them"
        )
        kept = backend_options(backend)
        again = _through_json(kept)
        assert again == kept, f"the options {kept} come back from JSON as {again}"
        remade = self.make_backend(again)
        assert backend_options(remade) == kept, (
            f"a backend made from the options {kept} has {backend_options(remade)}"
        )

    def test_options_are_obeyed(self, options: Options) -> None:
        """``is_dynamic`` and ``is_qat`` mean the same for every backend; both are off by default."""
        backend = self.make_backend(options)
        for name in ("is_dynamic", "is_qat"):
            wanted, found = options.get(name, False), getattr(backend, name, None)
            assert found is wanted, f"{name} is {found!r} with the options {dict(options)}"

    def test_repr_shows_the_options(self, options: Options) -> None:
        """A message that shows a backend tells how to make it."""
        backend = self.make_backend(options)
        for name, value in backend_options(backend).items():
            shown = f"{name}={value!r}"
            assert shown in repr(backend), f"repr() lacks {shown}: {backend!r}"
        assert repr(backend).startswith(type(backend).__name__), (
            f"repr() does not begin with the class: {backend!r}"
        )

    def test_importing_changes_nothing(self) -> None:
        """In a new interpreter: Inductor, the environment and other packages are left alone."""
        found = ask("import", self.make_backend())
        assert not found["changed"], (
            f"importing {self.backend_class.__module__} and making a quantizer changed "
            f"{', '.join(found['changed'])}: import torchao's quantizers by "
            f"versatil_core.load_quantizer_module, and set values in inductor_settings only"
        )
        assert not found["imported"], (
            f"importing {self.backend_class.__module__} also imported the hardware packages "
            f"{', '.join(found['imported'])}, which a user of this one may not have"
        )

    def test_every_setting_has_a_reason(self) -> None:
        """Each pinned value exists, and says why it is pinned."""
        settings = self.make_backend().inductor_settings
        known = inductor_config()
        for setting in settings.config:
            assert setting.name in known, (
                f"inductor_settings pins {setting.name!r}, which torch._inductor.config lacks"
            )
        for setting in (*settings.config, *settings.environment):
            assert len(setting.reason.split()) >= _MIN_WORDS, (
                f"the reason for {setting.name} = {setting.value!r} is {setting.reason!r}: say in "
                f"a sentence why the backend needs it"
            )

    def test_rules_are_usable(self, options: Options) -> None:
        """They name machines and operators, and are the same each time."""
        backend = self.make_backend(options)
        rules = backend.lowering_rules
        assert isinstance(rules, LoweringRules), f"lowering_rules is {rules!r}"
        assert rules == backend.lowering_rules, "lowering_rules differ from one reading to the next"
        assert rules.machine_types, "lowering_rules name no machine type"
        for machine in rules.machine_types:
            assert machine == machine.lower(), (
                f"the machine type {machine!r} can never match: they are compared in lower case"
            )
        which = "operator with a measured scale" if backend.is_dynamic else "operator"
        assert _lowered_ops(backend), (
            f"lowering_rules admit no {which}: every layer would stay float"
        )
        assert Int8Lowering(rules).uuid(), "the lowering has no identity for compile caches"


def _lowered_ops(backend: BasePT2EBackend) -> frozenset[str]:
    rules = backend.lowering_rules
    return rules.ops & rules.dynamic_ops if backend.is_dynamic else rules.ops


def _through_json(options: Options) -> Options:
    try:
        text = json.dumps(dict(options))
    except TypeError as error:
        raise AssertionError(f"the options {dict(options)} are no JSON values: {error}") from error
    loaded: Options = json.loads(text)
    return loaded
