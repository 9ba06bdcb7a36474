"""Decide what a release is, and what stands in its way. Nothing here touches a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from packaging.requirements import Requirement
from packaging.version import Version

from public_api import incompatible_changes
from release_state import Published, State

LEVELS = ("major", "minor", "patch")
# What comes before the first release.
NOTHING = Version("0.0.0")


@dataclass(frozen=True)
class Release:
    """A release of one package, before it is made."""

    package: str
    old: Version
    new: Version

    @property
    def tag(self) -> str:
        """The name of its tag."""
        return f"{self.package}-v{self.new}"

    @property
    def subject(self) -> str:
        """The subject of its commit."""
        return f"{self.package.removeprefix('versatil-')}: release {self.new}"

    @property
    def may_break(self) -> bool:
        """Whether the public API may change incompatibly: major, or minor below 1.0."""
        if self.old.major == 0 and self.new.major == 0:
            return self.new.minor > self.old.minor
        return self.new.major > self.old.major

    @property
    def interface(self) -> str:
        """The versions that keep its interface: one minor below 1.0, one major from there on."""
        major, minor = self.new.major, self.new.minor
        end = f"{major}.{minor + 1}" if major == 0 else f"{major + 1}"
        return f">={major}.{minor},<{end}"


def plan(state: State, level: str) -> Release:
    """Return the release of that level: 0.1.3 becomes 1.0.0, 0.2.0 or 0.1.4."""
    old = state.newest or NOTHING
    place = LEVELS.index(level)
    parts = [*old.release[:place], old.release[place] + 1, 0, 0]
    return Release(state.package, old, Version(".".join(map(str, parts[:3]))))


def problems(state: State, release: Release) -> list[str]:
    """Return why the release must not be made, a sentence for each reason."""
    return [
        *_repository_problems(state, release),
        *_version_problems(state, release),
        *_fragment_problems(state),
        *_api_problems(state.released.get(release.old, ""), state.public_api, release),
        *_range_problems(state),
        *_publication_problems(state, release),
    ]


def disagreements(state: State) -> list[str]:
    """Return where version, tag, changelog, fragments and ranges disagree."""
    return [
        *_tag_disagreements(state),
        *_unknown_kinds(state),
        *_range_problems(state),
        *(_publication_range_problems(state) if state.published else ()),
    ]


def trials(state: State, release: Release) -> list[list[str]]:
    """Return what to try the new wheel with: newest siblings, oldest siblings, each dependant."""
    sets = [
        *reversed(published_siblings(state)),
        *((wheel,) for wheel in dependants(state, release)),
    ]
    return [[f"{wheel.name}=={wheel.version}" for wheel in wheels] for wheels in sets]


def dependants(state: State, release: Release) -> list[Published]:
    """Return the newest of each published package that would take the new version."""
    return [
        wheel
        for name in sorted({wheel.name for wheel in state.published} - {state.package})
        if (wheel := _newest(state.published, name)) and _takes(wheel.siblings, release)
    ]


def left_behind(state: State, release: Release) -> list[str]:
    """Return the packages of the tree whose ranges leave out the new version."""
    return [
        name
        for name, needs in state.siblings.items()
        if any(need.name == release.package and release.new not in need.specifier for need in needs)
    ]


def raised(project: str, release: Release) -> str:
    """Return a ``pyproject.toml`` that asks for the released interface, also where it has extras.

    Args:
        project: The text of a dependant's ``pyproject.toml``.
        release: The release.
    """
    need = rf"""(["'])({release.package}(?:\[[^]"']*\])?)\s*[<>=!~][^;"']*"""
    return re.sub(need, rf"\g<1>\g<2>{release.interface}", project)


def published_siblings(state: State) -> list[tuple[Published, ...]]:
    """Return the oldest and the newest set of published siblings; one, if they are the same.

    In a set is one version of each sibling, and everything admits what it needs of the others.
    """
    names = sorted({need.name for need in _own_needs(state)})
    choices = (
        sorted((it for it in state.published if it.name == name), key=lambda it: it.version)
        for name in names
    )
    found = [wheels for wheels in product(*choices) if _fit_together(state, wheels)]
    return list(dict.fromkeys([*found[:1], *found[-1:]]))


def _fit_together(state: State, wheels: tuple[Published, ...]) -> bool:
    """Whether the package and these wheels admit each other."""
    versions = {wheel.name: wheel.version for wheel in wheels}
    needs = [*_own_needs(state), *(need for wheel in wheels for need in wheel.siblings)]
    return all(versions[need.name] in need.specifier for need in needs if need.name in versions)


def notes(state: State, release: Release) -> list[str]:
    """Return what is allowed, but good to know."""
    found = []
    for need in _own_needs(state):
        newest = _newest(state.published, need.name)
        if newest and newest.version not in need.specifier:
            found.append(f"{need} leaves out {need.name} {newest.version}, which is published")
    for name in state.siblings:
        wheel = _newest(state.published, name)
        if wheel and _takes(wheel.siblings, release) is False:
            found.append(f"{name} {wheel.version} stays with {_need(wheel.siblings, release)}")
    return found


def _repository_problems(state: State, release: Release) -> Iterator[str]:
    if state.changed:
        few = ", ".join(state.changed[:3]) + (", ..." if len(state.changed) > 3 else "")
        yield f"the tree has changes that are not committed ({few}): commit or remove them"
    if not state.branch:
        yield "HEAD is on no branch: check out the one to release from"
    if state.behind:
        yield f"{state.branch} is behind its upstream (commits missing: {state.behind}): pull first"
    if release.new in state.tagged:
        yield f"the tag {release.tag} exists"


def _version_problems(state: State, release: Release) -> Iterator[str]:
    if not state.released and state.version != release.new:
        yield (
            f"nothing of {release.package} has a tag in this history, so its first release is "
            f"what __about__.py says, {state.version}; counted from {NOTHING} that is not "
            f"{release.new}. Name the level that fits, or fetch the tags that are missing"
        )
    if state.released and state.version != release.old:
        yield f"__about__.py says {state.version}, the newest tag {release.old}: undo the one"
    newest = state.sections[0] if state.sections else NOTHING
    if newest != release.old:
        yield (
            f"the changelog starts with {_shown(newest)}, but the newest tag is "
            f"{_shown(release.old)}: fetch the tags, or undo the section"
        )


def _fragment_problems(state: State) -> Iterator[str]:
    if not state.fragments:
        yield f"packages/{state.package}/changelog.d has no fragment: say what has changed"
    yield from _unknown_kinds(state)


def _unknown_kinds(state: State) -> Iterator[str]:
    for name in state.fragments:
        parts = name.split(".")
        if len(parts) != 3 or parts[1] not in state.kinds or parts[2] != "md":
            kinds = ", ".join(sorted(state.kinds))
            yield f"changelog.d/{name}: not <short-name>.<kind>.md, with a kind of {kinds}"


def _api_problems(old: str, new: str, release: Release) -> Iterator[str]:
    if not release.may_break:
        for change in incompatible_changes(old, new):
            level = "minor" if release.old.major == 0 else "major"
            yield f"{change}, which takes a {level} release: {release.new} is none"


def _range_problems(state: State) -> Iterator[str]:
    for need in _own_needs(state):
        if state.versions[need.name] not in need.specifier:
            yield (
                f"its range {need} does not admit the {need.name} of this tree, "
                f"{state.versions[need.name]}: change the range in its pyproject.toml"
            )


def _publication_problems(state: State, release: Release) -> Iterator[str]:
    if any(
        (wheel.name, wheel.version) == (release.package, release.new) for wheel in state.published
    ):
        yield f"{release.package} {release.new} is published already"
    yield from _publication_range_problems(state)


def _publication_range_problems(state: State) -> list[str]:
    found = []
    for need in _own_needs(state):
        versions = [wheel.version for wheel in state.published if wheel.name == need.name]
        if not any(version in need.specifier for version in versions):
            known = ", ".join(map(str, sorted(versions))) or "nothing"
            found.append(
                f"its range {need} admits no published {need.name} (there is {known}): "
                f"release {need.name} first, or widen the range"
            )
    if not found and not published_siblings(state):
        needs = ", ".join(map(str, _own_needs(state)))
        found.append(
            f"no published siblings fit its ranges ({needs}) and each other: release one that does"
        )
    return found


def _tag_disagreements(state: State) -> Iterator[str]:
    top = state.sections[0] if state.sections else None
    if state.newest is None:
        if top is not None:
            yield f"the changelog starts with {top}, but {state.package}-v{top} is no tag here"
        return
    if state.version != state.newest:
        yield f"__about__.py says {state.version}, the newest tag {state.newest}"
    if top != state.newest:
        yield f"the changelog starts with {top or 'nothing'}, the newest tag is {state.newest}"
    if state.newest in state.at_head:
        if state.fragments:
            yield f"at its tag, fragments are left: {', '.join(state.fragments)}"
        old = max(set(state.released) - {state.newest}, default=NOTHING)
        release = Release(state.package, old, state.newest)
        yield from _api_problems(state.released.get(old, ""), state.public_api, release)


def _own_needs(state: State) -> list[Requirement]:
    """Return what the package needs of its siblings, each range once."""
    needs = reversed(state.siblings[state.package])
    return list({(need.name, str(need.specifier)): need for need in needs}.values())[::-1]


def _need(needs: Iterable[Requirement], release: Release) -> Requirement | None:
    """Return the requirement for the released package, if there is one."""
    return next((need for need in needs if need.name == release.package), None)


def _takes(needs: Iterable[Requirement], release: Release) -> bool | None:
    """Whether these requirements admit the new version; None if they don't need it."""
    need = _need(needs, release)
    return None if need is None else release.new in need.specifier


def _newest(wheels: Iterable[Published], name: str) -> Published | None:
    """Return the newest wheel of that name."""
    mine = (wheel for wheel in wheels if wheel.name == name)
    return max(mine, key=lambda wheel: wheel.version, default=None)


def _shown(version: Version) -> str:
    return "nothing" if version == NOTHING else str(version)
