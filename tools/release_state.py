"""Read what a release depends on: the package's files, its tags, and published wheels."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from wheels import PACKAGES

OURS = {package.name for package in PACKAGES}
MARKER = "<!-- towncrier release notes start -->"
# Headings and versions as towncrier.toml and __about__.py write them.
SECTION = re.compile(r"^## (\d+\.\d+\.\d+)\b", re.MULTILINE)
VERSION = re.compile(r'^__version__ = "(\d+\.\d+\.\d+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Published:
    """A wheel in the folder of published ones: what it is, and what it needs of ours."""

    name: str
    version: Version
    siblings: tuple[Requirement, ...]


@dataclass(frozen=True)
class State:
    """All that decides about a release of one package.

    Attributes:
        package: The distribution, such as ``versatil-x86``.
        versions: What ``__about__.py`` says, of each package in the tree.
        siblings: What each package in the tree needs of the others.
        released: Versions with a tag in the history of HEAD, and the public API of each.
        tagged: Versions with a tag anywhere.
        at_head: Versions whose tag is at HEAD.
        sections: Versions in the changelog, newest first.
        fragments: Names of the files from which the changelog is built.
        kinds: Kinds of fragments that there are.
        public_api: The package's public API, as it is now.
        published: The wheels that users can install.
        changed: Files that differ from HEAD, or that git doesn't know.
        branch: The branch that HEAD is on, or ``""``.
        behind: How many commits of its upstream the branch lacks.
    """

    package: str
    versions: Mapping[str, Version]
    siblings: Mapping[str, tuple[Requirement, ...]]
    released: Mapping[Version, str]
    tagged: frozenset[Version] = frozenset()
    at_head: frozenset[Version] = frozenset()
    sections: tuple[Version, ...] = ()
    fragments: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    public_api: str = ""
    published: tuple[Published, ...] = ()
    changed: tuple[str, ...] = ()
    branch: str = ""
    behind: int = 0

    @property
    def version(self) -> Version:
        """What the package's own ``__about__.py`` says."""
        return self.versions[self.package]

    @property
    def newest(self) -> Version | None:
        """The newest released version in the history of HEAD."""
        return max(self.released, default=None)


def read_state(root: Path, package: str, index: Path | None) -> State:
    """Read the state of one package.

    Args:
        root: The repository.
        package: A distribution in it.
        index: Folder of published wheels.
    """
    folder = root / "packages" / package
    projects = sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))
    return State(
        package=package,
        versions={project.name: about_version(project) for project in projects},
        siblings={project.name: tuple(declared_siblings(project)) for project in projects},
        released={
            version: git(root, "show", f"{package}-v{version}:packages/{package}/public_api.txt")
            for version in tags(root, package, "--merged", "HEAD")
        },
        tagged=tags(root, package),
        at_head=tags(root, package, "--points-at", "HEAD"),
        sections=changelog_versions((folder / "CHANGELOG.md").read_text("utf-8")),
        fragments=fragment_names(folder / "changelog.d"),
        kinds=fragment_kinds(root),
        public_api=(folder / "public_api.txt").read_text("utf-8"),
        published=published_wheels(index) if index else (),
        changed=tuple(line[3:] for line in git(root, "status", "--porcelain").splitlines()),
        branch=git(root, "branch", "--show-current").strip(),
        behind=commits_behind(root),
    )


def about_file(project: Path) -> Path:
    """Return the file that holds the version of a package, given its folder."""
    return project / "src" / project.name.replace("-", "_") / "__about__.py"


def about_version(project: Path) -> Version:
    """Return the version of a package, given its folder."""
    found = VERSION.search(about_file(project).read_text("utf-8"))
    if not found:
        sys.exit(f'{about_file(project)}: no line like __version__ = "1.2.3"')
    return Version(found[1])


def declared_siblings(project: Path) -> Iterator[Requirement]:
    """Yield what a ``pyproject.toml`` asks for of our own, extras included."""
    table = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    extras = table.get("optional-dependencies", {}).values()
    for line in [*table["dependencies"], *(line for extra in extras for line in extra)]:
        if is_ours(Requirement(line).name):
            yield Requirement(line)


def changelog_versions(text: str) -> tuple[Version, ...]:
    """Return the versions of a changelog, newest first."""
    _, marker, sections = text.partition(MARKER)
    if not marker:
        sys.exit(f"a changelog has no line {MARKER}: towncrier would not know where to write")
    return tuple(map(Version, SECTION.findall(sections)))


def fragment_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the files from which a changelog is built."""
    return tuple(sorted({path.name for path in folder.glob("*")} - {"README.md"}))


def fragment_kinds(root: Path) -> frozenset[str]:
    """Return the kinds of fragments that ``towncrier.toml`` lists."""
    table = tomllib.loads((root / "towncrier.toml").read_text("utf-8"))
    return frozenset(kind["directory"] for kind in table["tool"]["towncrier"]["type"])


def tags(root: Path, package: str, *which: str) -> frozenset[Version]:
    """Return the versions of a package that are tagged."""
    names = git(root, "tag", "--list", f"{package}-v*", *which).split()
    return frozenset(tag_version(name, package) for name in names)


def tag_version(tag: str, package: str) -> Version:
    """Return the version that a tag names."""
    try:
        return Version(tag.removeprefix(f"{package}-v"))
    except InvalidVersion:
        sys.exit(
            f"the tag {tag} names no version, as {package}-v1.2.3 does: "
            f"delete it with `git tag --delete {tag}`"
        )


def commits_behind(root: Path) -> int:
    """Return how many commits of its upstream, as last fetched, the branch lacks."""
    upstream = git(root, "for-each-ref", "--format=%(upstream)", current_ref(root)).strip()
    return int(git(root, "rev-list", "--count", f"HEAD..{upstream}")) if upstream else 0


def current_ref(root: Path) -> str:
    """Return the full name of the branch that HEAD is on."""
    return f"refs/heads/{git(root, 'branch', '--show-current').strip()}"


def published_wheels(index: Path) -> tuple[Published, ...]:
    """Read the wheels in a folder, as far as they are ours."""
    if not index.is_dir():
        sys.exit(f"{index}: no such folder; it should hold the wheels that are published")
    return tuple(map(published, our_wheels(index)))


def our_wheels(index: Path) -> list[Path]:
    """Return the wheels in a folder that are ours, whatever else is there."""
    wheels = sorted(index.glob("*.whl"))
    return [wheel for wheel in wheels if is_ours(wheel_identity(wheel)[0])]


def published(wheel: Path) -> Published:
    """Read the name, the version and the siblings of one wheel."""
    name, version = wheel_identity(wheel)
    needed = (requirement for requirement in wheel_requires(wheel) if is_ours(requirement.name))
    return Published(name, version, tuple(needed))


def wheel_identity(wheel: Path) -> tuple[str, Version]:
    """Return the distribution and the version that a wheel's file name says."""
    try:
        name, version, *_ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        sys.exit(f"{wheel}: {error}: rename the file as the index names it, or remove it")
    return name, version


def wheel_requires(wheel: Path) -> list[Requirement]:
    """Return what a wheel declares to need, extras included."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            headers = Parser().parsestr(archive.read(name).decode())
    except (zipfile.BadZipFile, ValueError) as error:
        sys.exit(f"{wheel}: this is no whole wheel ({error}): fetch it again, or remove it")
    return list(map(Requirement, headers.get_all("Requires-Dist", [])))


def is_ours(name: str) -> bool:
    """Whether a distribution is one of the four; ``versatil`` alone is somebody else's."""
    return canonicalize_name(name) in OURS


def git(root: Path, *arguments: str | Path) -> str:
    """Return what git prints; end the program with its message if it fails."""
    result = subprocess.run(
        ["git", *map(str, arguments)], cwd=root, check=False, capture_output=True, text=True
    )
    if result.returncode:
        sys.exit(f"git {arguments[0]} failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout
