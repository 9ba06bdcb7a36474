"""What a release is, and what stands in its way: decided from a state alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import release_plan
from release_plan import Release, plan, problems
from release_state import Published, State, changelog_versions, is_ours, published_wheels

V = Version
NEEDS = (Requirement("versatil-core>=0.1,<0.2"), Requirement("versatil-passes>=0.1,<0.2"))
CORE_NEEDS = (Requirement("versatil-passes>=0.1,<0.2"),)
PUBLISHED = (
    Published("versatil-passes", V("0.1.0"), ()),
    Published("versatil-core", V("0.1.0"), CORE_NEEDS),
    Published("versatil-x86", V("0.1.0"), NEEDS),
)
STATE = State(
    package="versatil-x86",
    versions={name: V("0.1.0") for name in ["versatil-passes", "versatil-core", "versatil-x86"]},
    siblings={"versatil-passes": (), "versatil-core": CORE_NEEDS, "versatil-x86": NEEDS},
    released={V("0.1.0"): "f(a)\n"},
    tagged=frozenset({V("0.1.0")}),
    sections=(V("0.1.0"),),
    fragments=("a.fixed.md",),
    kinds=frozenset({"fixed", "numerics"}),
    public_api="f(a)\n",
    published=PUBLISHED,
    branch="main",
)


def found(level: str, **changes: Any) -> list[str]:
    """Return the problems of a release from the state above, changed in some fields."""
    state = replace(STATE, **changes)
    return problems(state, plan(state, level))


@pytest.mark.parametrize("level", ["major", "minor", "patch"])
def test_nothing_stands_in_the_way_of_a_good_state(level: str) -> None:
    assert found(level) == []


@pytest.mark.parametrize(
    ("old", "level", "new"),
    [
        ("0.1.3", "patch", "0.1.4"),
        ("0.1.3", "minor", "0.2.0"),
        ("0.1.3", "major", "1.0.0"),
        ("1.2.3", "minor", "1.3.0"),
        ("1.9.9", "major", "2.0.0"),
    ],
)
def test_the_level_makes_the_version(old: str, level: str, new: str) -> None:
    state = replace(STATE, released={V(old): "", V("0.0.1"): ""})

    release = plan(state, level)

    assert (release.old, release.new) == (V(old), V(new))
    assert release.tag == f"versatil-x86-v{new}"
    assert release.subject == f"x86: release {new}"


@pytest.mark.parametrize(
    ("old", "new", "may_break"),
    [
        ("0.1.0", "0.1.1", False),
        ("0.1.0", "0.2.0", True),
        ("0.1.0", "1.0.0", True),
        ("1.1.0", "1.2.0", False),
        ("1.1.0", "2.0.0", True),
    ],
)
def test_only_some_versions_may_break_the_interface(old: str, new: str, may_break: bool) -> None:
    assert Release("versatil-x86", V(old), V(new)).may_break is may_break


def test_the_first_release_is_what_about_says() -> None:
    first: dict[str, Any] = {"released": {}, "tagged": frozenset(), "sections": ()}
    unpublished = PUBLISHED[:2]

    assert found("minor", **first, published=unpublished) == []
    [problem] = found("patch", **first, published=unpublished)
    assert "its first release is what __about__.py says, 0.1.0" in problem


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"changed": ("a", "b", "c", "d")}, "not committed (a, b, c, ...)"),
        ({"branch": ""}, "HEAD is on no branch"),
        ({"behind": 2}, "main is behind its upstream (commits missing: 2)"),
        ({"tagged": frozenset({V("0.1.1")})}, "the tag versatil-x86-v0.1.1 exists"),
        ({"sections": ()}, "the changelog starts with nothing, but the newest tag is 0.1.0"),
        ({"sections": (V("0.1.1"),)}, "the changelog starts with 0.1.1"),
        ({"fragments": ()}, "has no fragment"),
        ({"fragments": ("a.fixd.md",)}, "changelog.d/a.fixd.md: not <short-name>.<kind>.md"),
        ({"fragments": ("a.fixed.rst",)}, "changelog.d/a.fixed.rst: not"),
        ({"public_api": ""}, "f was removed, which takes a minor release: 0.1.1 is none"),
        ({"published": ()}, "no published versatil-core (there is nothing)"),
        (
            {"published": (*PUBLISHED, Published("versatil-x86", V("0.1.1"), NEEDS))},
            "versatil-x86 0.1.1 is published already",
        ),
    ],
)
def test_what_stands_in_the_way_is_named(changes: dict[str, Any], problem: str) -> None:
    assert any(problem in line for line in found("patch", **changes)), found("patch", **changes)


def test_about_must_be_the_newest_tag() -> None:
    [problem] = found("patch", versions=dict(STATE.versions) | {"versatil-x86": V("0.1.7")})

    assert problem.startswith("__about__.py says 0.1.7, the newest tag 0.1.0")


def test_ranges_must_admit_the_tree_and_something_published() -> None:
    needs = (Requirement("versatil-core>=0.2,<0.3"), NEEDS[1])

    in_tree, on_index = found("patch", siblings=dict(STATE.siblings) | {"versatil-x86": needs})

    assert "does not admit the versatil-core of this tree, 0.1.0" in in_tree
    assert "admits no published versatil-core (there is 0.1.0)" in on_index


def test_an_extra_does_not_say_the_same_twice() -> None:
    needs = (*NEEDS, Requirement("versatil-core[demo]>=0.1,<0.2"))

    problem = found("patch", siblings={"versatil-x86": needs}, published=PUBLISHED[:1])

    assert len(problem) == 1


def test_an_interface_may_change_in_a_minor_release_below_one() -> None:
    assert found("minor", public_api="") == []


def core(level: str) -> tuple[State, Release]:
    """Return a release of the package in the middle."""
    state = replace(STATE, package="versatil-core")
    return state, plan(state, level)


def test_dependants_that_take_the_new_version_are_tried() -> None:
    assert [wheel.name for wheel in release_plan.dependants(*core("patch"))] == ["versatil-x86"]
    assert release_plan.dependants(*core("minor")) == []


def test_dependants_that_stay_behind_are_told() -> None:
    assert release_plan.notes(*core("patch")) == []
    assert release_plan.left_behind(*core("patch")) == []
    assert release_plan.left_behind(*core("minor")) == ["versatil-x86"]
    [on_index] = release_plan.notes(*core("minor"))
    assert on_index == "versatil-x86 0.1.0 stays with versatil-core<0.2,>=0.1"


@pytest.mark.parametrize(
    ("new", "interface"),
    [("0.2.0", ">=0.2,<0.3"), ("1.0.0", ">=1.0,<2"), ("1.3.0", ">=1.3,<2")],
)
def test_a_dependant_asks_for_the_new_interface(new: str, interface: str) -> None:
    project = """
dependencies = [
    "versatil-core>=0.1,<0.2",
    'versatil-core >= 0.1.3 ; python_version > "3"',
    "versatil-passes>=0.1,<0.2",
    "versatil-core-of-others>=0.1",
]
demo = ["versatil-core[demo]>=0.1,<0.2"]
"""

    raised = release_plan.raised(project, Release("versatil-core", V("0.1.0"), V(new)))

    assert raised.splitlines() == [
        "",
        "dependencies = [",
        f'    "versatil-core{interface}",',
        f"    'versatil-core{interface}; python_version > \"3\"',",
        '    "versatil-passes>=0.1,<0.2",',
        '    "versatil-core-of-others>=0.1",',
        "]",
        f'demo = ["versatil-core[demo]{interface}"]',
    ]


def test_the_newest_and_the_oldest_siblings_are_tried() -> None:
    newer = (
        Published("versatil-passes", V("0.1.1"), ()),
        Published("versatil-core", V("0.1.1"), CORE_NEEDS),
        Published("versatil-core", V("0.2.0"), CORE_NEEDS),
    )
    state = replace(STATE, published=(*newer, *PUBLISHED))

    assert release_plan.trials(STATE, plan(STATE, "patch")) == [
        ["versatil-core==0.1.0", "versatil-passes==0.1.0"],
    ]
    assert release_plan.trials(state, plan(state, "patch")) == [
        ["versatil-core==0.1.1", "versatil-passes==0.1.1"],
        ["versatil-core==0.1.0", "versatil-passes==0.1.0"],
    ]
    assert release_plan.trials(*core("patch")) == [
        ["versatil-passes==0.1.0"],
        ["versatil-x86==0.1.0"],
    ]
    passes = replace(STATE, package="versatil-passes", published=())
    assert release_plan.trials(passes, plan(passes, "patch")) == [[]]


def test_siblings_that_exclude_each_other_are_not_tried() -> None:
    picky = Published("versatil-core", V("0.1.0"), (Requirement("versatil-passes>=0.1.1"),))
    passes = [Published("versatil-passes", V(f"0.1.{patch}"), ()) for patch in range(3)]

    state = replace(STATE, published=(picky, *passes))
    assert release_plan.trials(state, plan(state, "patch")) == [
        ["versatil-core==0.1.0", "versatil-passes==0.1.2"],
        ["versatil-core==0.1.0", "versatil-passes==0.1.1"],
    ]
    [problem] = found("patch", published=(picky, passes[0]))
    assert problem.startswith("no published siblings fit its ranges")


def test_a_newer_sibling_that_is_left_out_is_told() -> None:
    newer = Published("versatil-core", V("0.2.0"), CORE_NEEDS)
    state = replace(STATE, published=(*PUBLISHED, newer))

    assert problems(state, plan(state, "patch")) == []
    [note] = release_plan.notes(state, plan(state, "patch"))
    assert "leaves out versatil-core 0.2.0, which is published" in note


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"released": {}, "sections": ()}, []),
        (
            {"released": {}},
            ["the changelog starts with 0.1.0, but versatil-x86-v0.1.0 is no tag here"],
        ),
        ({"sections": ()}, ["the changelog starts with nothing, the newest tag is 0.1.0"]),
        ({"at_head": frozenset({V("0.1.0")})}, ["at its tag, fragments are left: a.fixed.md"]),
    ],
)
def test_what_disagrees_is_named(changes: dict[str, Any], said: list[str]) -> None:
    assert release_plan.disagreements(replace(STATE, **changes)) == said


def test_a_tag_that_breaks_more_than_it_says_disagrees() -> None:
    state = replace(
        STATE,
        versions=dict(STATE.versions) | {"versatil-x86": V("0.1.1")},
        released={V("0.1.0"): "f(a)\n", V("0.1.1"): "f(b)\n"},
        at_head=frozenset({V("0.1.1")}),
        sections=(V("0.1.1"), V("0.1.0")),
        fragments=(),
        public_api="f(b)\n",
    )

    assert any("f: a was removed" in line for line in release_plan.disagreements(state))


def test_the_namesake_is_none_of_ours(namesake_wheel: Path) -> None:
    assert is_ours("versatil_core")
    assert not is_ours("versatil")
    assert not is_ours("versatil-of-somebody-else")
    assert published_wheels(namesake_wheel.parent) == ()


def test_a_changelog_is_read_below_its_marker() -> None:
    text = "## 9.9.9\n<!-- towncrier release notes start -->\n\n## 0.2.0 (2026-01-01)\n\n## 0.1.0 (x)\n"

    assert changelog_versions(text) == (V("0.2.0"), V("0.1.0"))
    with pytest.raises(SystemExit, match="towncrier would not know where to write"):
        changelog_versions("## 0.2.0")
