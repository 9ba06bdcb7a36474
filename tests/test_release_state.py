"""What a release reads, where it can't be read: the message names it, and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from release_state import git, published_wheels, tags


def test_a_tag_that_names_no_version_is_named(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    tree = git(tmp_path, "write-tree").strip()
    git(tmp_path, "tag", "versatil-core-v0.1.0", tree)
    git(tmp_path, "tag", "versatil-passes-vfoo", tree)

    assert list(map(str, tags(tmp_path, "versatil-core"))) == ["0.1.0"]
    with pytest.raises(SystemExit, match="delete it with `git tag --delete versatil-passes-vfoo`"):
        tags(tmp_path, "versatil-passes")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("odd.whl", b"", r"odd\.whl: .*rename the file as the index names it, or remove it"),
        ("versatil_core-0.1.0-py3-none-any.whl", b"", "core.*: this is no whole wheel .*fetch it"),
        # An archive that ends at once, with nothing in it.
        (
            "versatil_core-0.1.0-py3-none-any.whl",
            b"PK\x05\x06" + bytes(18),
            "core.*: this is no whole wheel .*fetch it again, or remove it",
        ),
    ],
)
def test_a_file_that_is_no_wheel_is_named(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(SystemExit, match=reason):
        published_wheels(tmp_path)
