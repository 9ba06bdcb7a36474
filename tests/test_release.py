"""Releases on a throw-away clone: one package alone, then another; and what is refused."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

import release as tool
from release_clone import add_fragment, after, commit, empty_changelog, release, snapshot
from release_plan import Release
from release_state import about_file, about_version, changelog_versions, declared_siblings, git
from wheels import build_package


def check_released(home: Path, package: str, version: str, builder: Path) -> None:
    """Check that versions, tag, changelog, commit and files of a release go together."""
    project = home / "packages" / package
    changed = git(home, "diff", "--name-only", "HEAD~", "HEAD").split()
    changelog = (project / "CHANGELOG.md").read_text(encoding="utf-8")
    dist = home / "dist" / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    build_package(project, home.parent / "again", builder)

    assert about_version(project) == Version(version)
    assert git(home, "cat-file", "-t", f"{package}-v{version}").strip() == "tag"
    assert git(home, "rev-parse", f"{package}-v{version}^{{}}") == git(home, "rev-parse", "HEAD")
    assert git(home, "branch", "--show-current").strip() == "main"
    short_name = package.removeprefix("versatil-")
    assert git(home, "log", "-1", "--format=%s").strip() == f"{short_name}: release {version}"
    assert all(name.startswith(f"packages/{package}/") for name in changed)
    assert changelog_versions(changelog)[0] == Version(version)
    assert "### Numerics\n\n- Rounds to even.\n" in changelog
    assert not list((project / "changelog.d").glob("*.numerics.md"))
    assert not git(home, "status", "--porcelain")
    assert dist.read_bytes() == (home.parent / "again" / dist.name).read_bytes()
    assert dist.with_name(dist.name.replace("-py3-none-any.whl", ".tar.gz")).is_file()


def test_two_packages_are_released_one_after_the_other(
    home: Path, index: Path, wheelhouse: Path, builder: Path
) -> None:
    x86, core = after(home, "versatil-x86", "minor"), after(home, "versatil-core", "patch")
    passes = about_version(home / "packages" / "versatil-passes")

    add_fragment(home, "versatil-x86")
    first = release(
        home, "versatil-x86", "minor", "--index", index, "--wheelhouse", wheelhouse.resolve()
    )

    assert first.returncode == 0, first.stderr
    assert "x86_inductor: " in first.stdout
    assert f"git push --atomic origin main versatil-x86-v{x86}" in first.stdout
    check_released(home, "versatil-x86", x86, builder)
    shutil.copy(next((home / "dist").glob("*.whl")), index)

    add_fragment(home, "versatil-core")
    second = release(
        home, "versatil-core", "patch", "--index", index, "--wheelhouse", wheelhouse.resolve()
    )

    assert second.returncode == 0, second.stderr
    both = f"versatil-core {core}, versatil-passes {passes}, versatil-x86 {x86}"
    assert both in second.stdout.splitlines()
    check_released(home, "versatil-core", core, builder)
    assert release(home, "--check").returncode == 0
    assert release(home, "--check", "versatil-x86", "--index", index).returncode == 0


def test_a_new_interface_raises_the_ranges_of_dependants(
    home: Path, index: Path, wheelhouse: Path
) -> None:
    old, new = about_version(home / "packages/versatil-core"), after(home, "versatil-core", "minor")
    add_fragment(home, "versatil-core")

    made = release(
        home, "versatil-core", "minor", "--index", index, "--wheelhouse", wheelhouse.resolve()
    )

    assert made.returncode == 0, made.stderr
    checked = release(home, "--check")
    assert checked.returncode == 0, checked.stdout
    assert not git(home, "status", "--porcelain")
    for package in ["versatil-arm", "versatil-x86"]:
        project = home / "packages" / package
        needs = [need for need in declared_siblings(project) if need.name == "versatil-core"]
        assert sorted(need.extras for need in needs) == [set(), {"demo"}]
        assert all(new in need.specifier and old not in need.specifier for need in needs)
        fragment = project / "changelog.d" / "needs-versatil-core.changed.md"
        assert fragment.read_text("utf-8") == f"Needs versatil-core {new.removesuffix('.0')}.\n"

    plan: list[str | Path] = ["versatil-x86", "patch", "--index", index, "--dry-run"]
    assert "release versatil-core first" in release(home, *plan).stderr
    shutil.copy(next((home / "dist").glob("*.whl")), index)
    planned = release(home, *plan)
    assert planned.returncode == 0, planned.stderr
    assert f"- Needs versatil-core {new.removesuffix('.0')}." in planned.stdout


def test_the_oldest_sibling_that_a_range_admits_is_tried(
    home: Path, index: Path, wheelhouse: Path, builder: Path
) -> None:
    core, x86 = home / "packages/versatil-core", home / "packages/versatil-x86"
    old, new = about_version(core), after(home, "versatil-core", "patch")
    about_file(core).write_text(f'"""."""\n\n__version__ = "{new}"\n', encoding="utf-8")
    (core / "src/versatil_core/later.py").touch()
    build_package(core, index, builder)
    with (x86 / "src/versatil_x86/__init__.py").open("a", encoding="utf-8") as file:
        file.write("import versatil_core.later\n")
    add_fragment(home, "versatil-x86")
    command: list[str | Path] = ["versatil-x86", "patch", "--index", index]
    command += ["--wheelhouse", wheelhouse.resolve()]

    refused = release(home, *command)
    project = (x86 / "pyproject.toml").read_text("utf-8")
    raised = re.sub(r'(versatil-core(\[demo\])?)>=[^,"]*', rf"\1>={new}", project)
    (x86 / "pyproject.toml").write_text(raised, encoding="utf-8")
    commit(home, "asks for what it uses")
    made = release(home, *command)

    assert refused.returncode == 1
    assert f"trying it with versatil-core=={new}" in refused.stdout
    assert f"trying it with versatil-core=={old}" in refused.stdout
    assert "No module named 'versatil_core.later'" in refused.stderr
    assert made.returncode == 0, made.stderr
    assert f"with versatil-core=={old}" not in made.stdout


def test_a_first_release_is_what_about_says(
    home: Path, tmp_path: Path, wheelhouse: Path, builder: Path
) -> None:
    project = home / "packages" / "versatil-passes"
    for tag in git(home, "tag", "--list", "versatil-passes-*").split():
        git(home, "tag", "--delete", tag)
    empty_changelog(project)
    about_file(project).write_text('"""."""\n\n__version__ = "0.1.0"\n', encoding="utf-8")
    add_fragment(home, "versatil-passes")
    (tmp_path / "nothing").mkdir()
    options: list[str | Path] = [
        "--index",
        tmp_path / "nothing",
        "--wheelhouse",
        wheelhouse.resolve(),
    ]

    checked = release(home, "--check", "versatil-passes")
    refused = release(home, "versatil-passes", "patch", *options)
    made = release(home, "versatil-passes", "minor", *options)

    assert checked.returncode == 0, checked.stdout
    assert "no tag here, unreleased or not fetched (git fetch --tags)" in checked.stdout
    assert "its first release is what __about__.py says, 0.1.0" in refused.stderr
    assert made.returncode == 0, made.stderr
    check_released(home, "versatil-passes", "0.1.0", builder)


def test_a_dry_run_changes_nothing(home: Path, index: Path) -> None:
    add_fragment(home, "versatil-core")
    before = snapshot(home)

    result = release(home, "versatil-core", "minor", "--index", index, "--dry-run")

    new = after(home, "versatil-core", "minor")
    assert result.returncode == 0, result.stderr
    assert f"versatil-core-v{new}" in result.stdout
    assert "- Rounds to even." in result.stdout
    assert re.search(
        r"raised +to versatil-core>=.* in versatil-arm, versatil-x86$", result.stdout, re.MULTILINE
    )
    assert snapshot(home) == before


def break_import(package: Path, module: str) -> None:
    """Let a module of a package fail when it is imported."""
    [file] = (package / "src").rglob(module)
    file.write_text('raise ImportError("broken")\n', encoding="utf-8")


def break_quantizer(package: Path, module: str) -> None:
    """Let a quantizer fail when it is used."""
    [file] = (package / "src").rglob(module)
    with file.open("a", encoding="utf-8") as text:
        text.write('def annotate(self, model):\n    raise ImportError("broken")\n')
        text.write("LayerQuantizer.annotate = annotate\n")


def take_file_name(package: Path, ending: str) -> None:
    """Put something in the place of a file that the release builds."""
    home = package.parent.parent
    name = f"{package.name.replace('-', '_')}-{after(home, package.name, 'patch')}{ending}"
    (home / "dist" / name / "in_the_way").mkdir(parents=True)


def promise_more(package: Path, name: str) -> None:
    """Write a name into the public API that the package does not have."""
    with (package / "public_api.txt").open("a", encoding="utf-8") as file:
        file.write(f"{name}()\n")


@pytest.mark.parametrize(
    ("package", "spoil", "what", "reason"),
    [
        ("versatil-passes", break_import, "pass_chain.py", "ImportError: broken"),
        # Only a published dependant calls this.
        ("versatil-core", break_quantizer, "layer_quantizer.py", "ImportError: broken"),
        ("versatil-passes", promise_more, "zip", "run `python tools/public_api.py --write`"),
        ("versatil-arm", take_file_name, ".tar.gz", "was not released: [Errno"),
    ],
)
def test_a_wheel_that_does_not_work_leaves_all_as_it_was(
    home: Path,
    index: Path,
    wheelhouse: Path,
    package: str,
    spoil: Callable[[Path, str], None],
    what: str,
    reason: str,
) -> None:
    spoil(home / "packages" / package, what)
    add_fragment(home, package)
    before = snapshot(home)

    result = release(home, package, "patch", "--index", index, "--wheelhouse", wheelhouse.resolve())

    assert result.returncode == 1
    assert reason in result.stderr
    assert snapshot(home) == before


def test_files_are_taken_away_again_if_the_tag_fails(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "a.whl").touch()

    def fail() -> None:
        with tool.moved([tmp_path / "a.whl"], tmp_path / "dist"):
            assert (tmp_path / "dist" / "a.whl").is_file()
            sys.exit("no tag")

    with pytest.raises(SystemExit, match="no tag"):
        fail()

    assert not list((tmp_path / "dist").iterdir())


def test_a_branch_that_moved_meanwhile_leaves_no_tag(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = git(home, "commit-tree", "-p", "HEAD", "-m", "made aside", "HEAD^{tree}").strip()
    add_fragment(home, "versatil-x86")
    before = snapshot(home)
    monkeypatch.setattr(tool, "ROOT", home)

    with pytest.raises(SystemExit, match="git merge failed"):
        tool.publish_here(Release("versatil-x86", Version("7.0.0"), Version("7.1.0")), aside)

    assert snapshot(home) == before


def not_committed(home: Path) -> None:
    (home / "a_file").touch()


def on_no_branch(home: Path) -> None:
    git(home, "checkout", "--quiet", "--detach")


def behind_upstream(home: Path) -> None:
    git(home, "branch", "upstream")
    git(home, "reset", "--quiet", "--hard", "HEAD~")
    git(home, "branch", "--quiet", "--set-upstream-to", "upstream")


def tag_exists(home: Path) -> None:
    git(home, "tag", f"versatil-x86-v{after(home, 'versatil-x86', 'patch')}", "HEAD^{tree}")


def no_fragment(home: Path) -> None:
    (home / "packages/versatil-x86/changelog.d/rounding.numerics.md").unlink()
    commit(home, "on second thoughts")


def unknown_kind(home: Path) -> None:
    (home / "packages/versatil-x86/changelog.d/a.fixxed.md").write_text("A", encoding="utf-8")
    commit(home, "a fragment that no changelog would show")


def changelog_disagrees(home: Path) -> None:
    empty_changelog(home / "packages/versatil-x86")
    add_fragment(home, "versatil-x86")


def about_disagrees(home: Path) -> None:
    about = about_file(home / "packages/versatil-x86")
    about.write_text('__version__ = "77.0.0"\n', encoding="utf-8")
    commit(home, "bumped by hand")


def api_removed(home: Path) -> None:
    file = home / "packages/versatil-x86/public_api.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    commit(home, "a name less")


def range_leaves_out(home: Path) -> None:
    file = home / "packages/versatil-x86/pyproject.toml"
    text = re.sub('versatil-core>=[^"]*', "versatil-core>=77,<78", file.read_text("utf-8"))
    file.write_text(text, encoding="utf-8")
    commit(home, "asks for what there is not")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (not_committed, "changes that are not committed (a_file)"),
        (on_no_branch, "HEAD is on no branch"),
        (behind_upstream, "main is behind its upstream (commits missing: 1)"),
        (tag_exists, "the tag versatil-x86-v"),
        (no_fragment, "has no fragment"),
        (unknown_kind, "changelog.d/a.fixxed.md: not <short-name>.<kind>.md"),
        (changelog_disagrees, "the changelog starts with nothing, but the newest tag is"),
        (about_disagrees, "__about__.py says 77.0.0, the newest tag"),
        (api_removed, "make_saturation_safe was removed, which takes a minor release"),
        (range_leaves_out, "admits no published versatil-core"),
    ],
)
def test_a_release_is_refused(
    home: Path, index: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    add_fragment(home, "versatil-x86")
    spoil(home)
    before = snapshot(home)

    result = release(home, "versatil-x86", "patch", "--index", index)

    assert result.returncode == 1
    assert reason in result.stderr
    assert "Traceback" not in result.stderr
    assert snapshot(home) == before


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (about_disagrees, "versatil-x86: __about__.py says 77.0.0, the newest tag"),
        (changelog_disagrees, "versatil-x86: the changelog starts with nothing"),
        (unknown_kind, "versatil-x86: changelog.d/a.fixxed.md"),
        (range_leaves_out, "versatil-x86: its range versatil-core"),
    ],
)
def test_check_names_what_disagrees(home: Path, spoil: Callable[[Path], None], line: str) -> None:
    spoil(home)

    result = release(home, "--check")

    assert result.returncode == 1
    assert line in result.stdout


def test_check_is_content_with_changes_since_a_release(home: Path) -> None:
    at_tag = release(home, "--check")
    add_fragment(home, "versatil-x86")

    assert (at_tag.returncode, release(home, "--check").returncode) == (0, 0), at_tag.stdout


def test_wrong_usage_says_what_is_missing(home: Path) -> None:
    result = release(home, "versatil-x86", "minor")

    assert result.returncode == 2
    assert "a release takes PACKAGE, LEVEL and --index DIR" in result.stderr
