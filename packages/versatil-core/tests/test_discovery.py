"""Backends are listed without being imported; a bad one is named and harms no other."""

from pathlib import Path

import pytest

from versatil_core import (
    BackendConflictError,
    BackendLoadError,
    BackendNotFoundError,
    BackendOptionError,
    backend_options,
    create_backend,
    host_backend,
    installed_backends,
    load_backend,
)

GOOD = """
from versatil_core import BasePT2EBackend, InductorSettings
from versatil_passes import LoweringRules

class Backend(BasePT2EBackend):
    name = {name!r}
    def __init__(self, is_dynamic=False, is_qat=False, level=1):
        self.is_dynamic, self.is_qat, self.level = is_dynamic, is_qat, level
    @classmethod
    def for_host(cls, *, is_dynamic=False, level=7, machine=None):
        return cls(is_dynamic=is_dynamic, level=level)
    @property
    def inductor_settings(self):
        return InductorSettings()
    @property
    def lowering_rules(self):
        return LoweringRules(machine_types={machines!r})
    def create_quantizer(self, module_path=""):
        raise NotImplementedError
"""


class Site:
    """A folder of fake installed distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        distribution: str,
        entry_points: str,
        *,
        version: str = "1.0",
        module: str = "",
        code: str = "",
        requires: str = "",
    ) -> None:
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        metadata += f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "entry_points.txt").write_text(
            f"[versatil.backends]\n{entry_points}\n", encoding="utf-8"
        )
        if module:
            (self.folder / f"{module}.py").write_text(code, encoding="utf-8")

    def install_good(
        self,
        name: str,
        distribution: str,
        module: str,
        machines: tuple[str, ...] = ("imaginary",),
        requires: str = "",
    ) -> None:
        self.install(
            distribution,
            f"{name} = {module}:Backend",
            module=module,
            code=GOOD.format(name=name, machines=machines),
            requires=requires,
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a folder on ``sys.path`` to install fake backends in."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return Site(tmp_path)


def test_listing_imports_nothing(site: Site) -> None:
    site.install("fake-broken", "fake = fake_unimportable:Backend", version="0.3")

    [entry] = [entry for entry in installed_backends() if entry.name == "fake"]

    assert (entry.distribution, entry.version) == ("fake-broken", "0.3")
    assert entry.object_reference == "fake_unimportable:Backend"
    assert str(entry) == "fake-broken 0.3"


def test_a_backend_is_made_again_from_its_options(site: Site) -> None:
    site.install_good("fake", "fake-good", "fake_good_options")

    backend = create_backend("fake", {"is_dynamic": True, "level": 3})

    assert type(backend) is load_backend("fake")
    assert backend_options(backend) == {"is_dynamic": True, "is_qat": False, "level": 3}
    assert repr(backend) == "Backend(is_dynamic=True, is_qat=False, level=3)"


def test_options_that_do_not_fit_name_the_distribution(site: Site) -> None:
    site.install_good("fake", "fake-good", "fake_good_unfit")

    with pytest.raises(BackendLoadError, match=r"fake-good 1\.0.*colour"):
        create_backend("fake", {"colour": "red"})


def test_an_unknown_backend_lists_what_is_there(site: Site) -> None:
    site.install_good("fake", "fake-good", "fake_good_listed")

    with pytest.raises(BackendNotFoundError, match=r"'fakr'.*installed:.*fake") as error:
        load_backend("fakr")

    assert "fake" in error.value.installed
    assert error.value.name == "fakr"


def test_a_known_backend_says_what_to_install() -> None:
    if "arm_inductor" in [entry.name for entry in installed_backends()]:
        pytest.skip("versatil-arm is installed")

    with pytest.raises(BackendNotFoundError, match="pip install versatil-arm"):
        load_backend("arm_inductor")


def test_two_distributions_with_one_name(site: Site) -> None:
    site.install_good("fake", "fake-one", "fake_one")
    site.install_good("fake", "fake-two", "fake_two")

    with pytest.raises(BackendConflictError) as error:
        load_backend("fake")

    assert error.value.distributions == ("fake-one 1.0", "fake-two 1.0")
    assert "fake-one 1.0" in str(error.value)
    assert "fake-two 1.0" in str(error.value)


@pytest.mark.parametrize(
    ("entry_point", "code", "reason"),
    [
        ("fake_bad_a:Backend", "raise RuntimeError('no driver')", "RuntimeError: no driver"),
        ("fake_bad_b:Backend", "import fake_missing_dependency", "fake_missing_dependency"),
        ("fake_bad_c:Missing", "", "Missing"),
        ("fake_bad_d:Backend", "Backend = int", "no BasePT2EBackend"),
        ("fake_bad_e:Backend", GOOD.format(name="other", machines=("m",)), "'other'"),
    ],
    ids=["raises", "lacks a dependency", "lacks the class", "is another class", "other name"],
)
def test_a_broken_package_is_named_and_harms_no_other(
    site: Site, entry_point: str, code: str, reason: str
) -> None:
    module = entry_point.partition(":")[0]
    site.install("fake-bad", f"bad = {entry_point}", version="2.1", module=module, code=code)
    site.install_good("fake", "fake-good", f"{module}_neighbour")

    with pytest.raises(BackendLoadError, match=reason) as error:
        load_backend("bad")

    assert (error.value.distribution, error.value.version) == ("fake-bad", "2.1")
    assert "fake-bad 2.1" in str(error.value)
    assert load_backend("fake").name == "fake"


def test_a_package_for_another_core_is_refused_before_it_is_imported(site: Site) -> None:
    site.install(
        "fake-new",
        "new = fake_new_core:Backend",
        module="fake_new_core",
        code="raise SystemExit('imported')",
        requires="versatil-core>=99",
    )

    with pytest.raises(BackendLoadError, match=r"fake-new 1\.0.*needs versatil-core>=99"):
        load_backend("new")


def test_host_backend_takes_the_options_for_this_host(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "Imaginary")
    site.install_good("fake", "fake-good", "fake_good_host")
    site.install_good("other", "fake-other", "fake_other_host", machines=("pdp11",))
    site.install("fake-broken", "broken = fake_nowhere:Backend")

    assert backend_options(host_backend())["level"] == 7


def test_host_backend_takes_a_name_and_options(site: Site) -> None:
    """Also one whose kernels do not run here: a model can be quantized anywhere."""
    site.install_good("fake", "fake-good", "fake_good_named", machines=("pdp11",))

    plain, other = host_backend("fake"), host_backend("fake", {"is_dynamic": True, "level": 3})

    assert backend_options(plain) == {"is_dynamic": False, "is_qat": False, "level": 7}
    assert backend_options(other) == {"is_dynamic": True, "is_qat": False, "level": 3}


def test_host_backend_of_a_class_that_knows_no_host(site: Site) -> None:
    code = GOOD.format(name="fake", machines=("m",)).replace("def for_host", "def elsewhere")
    site.install("fake-plain", "fake = fake_plain:Backend", module="fake_plain", code=code)

    assert backend_options(host_backend("fake", {"is_qat": True}))["is_qat"] is True


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("colour", "red", "the options are is_dynamic, level"),
        ("is_qat", True, "the options are is_dynamic, level"),  # for_host() does not take it
        ("machine", "m", "the options are is_dynamic, level"),  # no option of the constructor
        ("is_dynamic", "False", "it is true or false"),
    ],
)
def test_an_option_that_a_backend_does_not_have(
    site: Site, option: str, value: object, remedy: str
) -> None:
    site.install_good("fake", "fake-good", f"fake_good_without_{option}")

    with pytest.raises(BackendOptionError, match=remedy) as error:
        host_backend("fake", {"level": 3, option: value})

    assert (error.value.backend, error.value.option) == ("fake", option)
    assert error.value.value == value


def test_no_host_backend_names_the_broken_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    site.install("fake-broken", "broken = fake_nowhere:Backend", version="0.9")

    with pytest.raises(BackendNotFoundError, match=r"riscv64[\s\S]*fake-broken 0\.9"):
        host_backend()


def test_no_host_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("versatil_core.discovery.installed_backends", lambda: ())

    with pytest.raises(BackendNotFoundError, match="pip install versatil-arm"):
        host_backend()


def test_two_host_backends_are_a_conflict(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "imaginary")
    site.install_good("one", "fake-one", "fake_host_one")
    site.install_good("two", "fake-two", "fake_host_two")

    with pytest.raises(BackendConflictError, match=r"one \(fake-one 1\.0\), two \(fake-two 1\.0\)"):
        host_backend()
