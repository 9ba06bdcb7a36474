"""Archives are read with suspicion: each kind of damage has its own message, and nothing is used before."""

import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from versatil_core import ModelFileError
from versatil_core.model_file import (
    MANIFEST_NAME,
    read_manifest_values,
    read_model_file,
    write_model_file,
)

MEMBERS = {"archive/weights": bytes(range(256)) * 4, "archive/graph.json": b'{"a": 1}' * 99}
MANIFEST = f"archive/extra/{MANIFEST_NAME}"
VALUES = {"format_version": 2, "text": "ä"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt2"
    write_model_file(path, VALUES, MEMBERS)
    return path


def rewrite(
    file: Path, change: Callable[[dict[str, bytes]], Mapping[str, bytes]], **options: Any
) -> None:
    """Write the archive anew with other members, all checksums right."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, data in change(members).items():
            archive.writestr(name, data)


def test_round_trip(file: Path) -> None:
    found = read_model_file(file)

    assert found.members == MEMBERS
    assert found.path == str(file)
    assert {name: found.manifest[name] for name in VALUES} == VALUES
    assert found.manifest["members"].keys() == MEMBERS.keys()
    assert all(len(digest) == 64 for digest in found.manifest["members"].values())
    assert read_manifest_values(file) == found.manifest


def test_the_same_content_is_the_same_bytes(file: Path, tmp_path: Path) -> None:
    write_model_file(tmp_path / "again.pt2", VALUES, MEMBERS)

    assert (tmp_path / "again.pt2").read_bytes() == file.read_bytes()


def test_text_is_packed_and_numbers_are_not(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        kinds = {info.filename: info.compress_type for info in archive.infolist()}

    assert kinds["archive/graph.json"] == zipfile.ZIP_DEFLATED
    assert kinds["archive/weights"] == zipfile.ZIP_STORED


@pytest.mark.parametrize("read", [read_model_file, read_manifest_values])
@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "does not exist"), (b"", "not a model file"), (b"hello" * 99, "not a model file")],
    ids=["missing", "empty", "text"],
)
def test_no_archive(
    tmp_path: Path, read: Callable[[Path], Any], content: bytes | None, reason: str
) -> None:
    path = tmp_path / "model.pt2"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ModelFileError, match=reason) as error:
        read(path)

    assert error.value.path == str(path)


def test_a_folder_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="not a model file"):
        read_model_file(tmp_path)


@pytest.mark.parametrize("kept", [1, 100, -1, -30, -500])
def test_cut_short(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])

    with pytest.raises(ModelFileError, match="cut short"):
        read_model_file(file)


def test_a_flipped_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.find(MEMBERS["archive/weights"]) + 5] ^= 1
    file.write_bytes(content)

    with pytest.raises(ModelFileError, match="archive/weights cannot be read"):
        read_model_file(file)


def test_a_member_was_changed(file: Path) -> None:
    rewrite(file, lambda members: {**members, "archive/weights": bytes(1024)})

    with pytest.raises(ModelFileError, match="another SHA-256 for archive/weights"):
        read_model_file(file)


def test_two_members_were_swapped(file: Path) -> None:
    first, second = MEMBERS
    swapped = {first: MEMBERS[second], second: MEMBERS[first]}
    rewrite(file, lambda members: {**members, **swapped})

    with pytest.raises(ModelFileError, match=f"another SHA-256 for {second}, {first}"):
        read_model_file(file)


def test_a_member_is_missing(file: Path) -> None:
    rewrite(file, lambda members: {n: d for n, d in members.items() if n != "archive/weights"})

    with pytest.raises(ModelFileError, match="lacks archive/weights"):
        read_model_file(file)


def test_members_too_many(file: Path) -> None:
    rewrite(file, lambda members: {**members, **{f"archive/{n}": b"" for n in range(9)}})

    with pytest.raises(
        ModelFileError, match=r"does not list, archive/0, archive/1, archive/2 and 6"
    ):
        read_model_file(file)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_is_there_twice(file: Path) -> None:
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/weights", b"other")

    with pytest.raises(ModelFileError, match="'archive/weights' twice"):
        read_model_file(file)


@pytest.mark.parametrize(
    "name",
    ["../evil", "/etc/evil", "archive/../../evil", "C:\\evil", "a\\..\\evil", "archive//x", "a/"],
)
def test_a_name_that_leads_out(file: Path, name: str) -> None:
    rewrite(file, lambda members: {**members, name: b"evil"})

    with pytest.raises(ModelFileError, match="made to write elsewhere"):
        read_model_file(file)


def test_a_link(file: Path) -> None:
    with zipfile.ZipFile(file, "a") as archive:
        info = zipfile.ZipInfo("archive/link")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")

    with pytest.raises(ModelFileError, match="made to write elsewhere"):
        read_model_file(file)


def test_a_member_that_would_fill_the_memory(file: Path) -> None:
    rewrite(
        file,
        lambda members: {**members, "archive/zeros": bytes(10_000_000)},
        compression=zipfile.ZIP_DEFLATED,
    )

    with pytest.raises(ModelFileError, match=r"archive/zeros.* made to fill the memory"):
        read_model_file(file)


def test_a_size_larger_than_the_file(file: Path) -> None:
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        size = struct.pack("<II", *[archive.getinfo("archive/weights").file_size] * 2)
    directory = content.rfind(size)
    content[directory : directory + 8] = struct.pack("<II", 2**31, 2**31)
    file.write_bytes(content)

    with pytest.raises(ModelFileError, match="from 2147483648 to 2147483648 bytes"):
        read_model_file(file)


def test_an_encrypted_member(file: Path) -> None:
    content = bytearray(file.read_bytes())
    directory = content.find(b"PK\x01\x02")
    content[directory + 8] |= 1
    file.write_bytes(content)

    with pytest.raises(ModelFileError, match=r"cannot be read.*encrypted"):
        read_model_file(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "damaged manifest: JSONDecodeError"),
        (b"\xff\xfe{", "damaged manifest: "),
        (b"[]", "list instead of names"),
        (b"{}", "does not list the members"),
        (b'{"members": 3}', "does not list the members"),
        (b"[" * 200_000, "damaged manifest: RecursionError"),
    ],
)
def test_a_damaged_manifest(file: Path, text: bytes, reason: str) -> None:
    rewrite(file, lambda members: {**members, MANIFEST: text})

    with pytest.raises(ModelFileError, match=reason):
        read_model_file(file)


def test_no_manifest_or_two(file: Path) -> None:
    rewrite(file, lambda members: {**members, f"archive/{MANIFEST_NAME}": b"{}"})
    with pytest.raises(ModelFileError, match="more than one manifest"):
        read_model_file(file)

    rewrite(file, lambda members: {n: d for n, d in members.items() if MANIFEST_NAME not in n})
    with pytest.raises(ModelFileError, match=r"no manifest.*quantize it first"):
        read_manifest_values(file)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_whatever_happens_to_a_file_is_found(file: Path, data: st.DataObject) -> None:
    """Bytes changed, cut out, put in, moved: an error of ours, or the content as it was written."""
    original = file.read_bytes()
    mutated = file.with_suffix(".mutated")
    mutated.write_bytes(data.draw(mutations(original)))

    try:
        found = read_model_file(mutated)
    except ModelFileError:
        return
    assert found.members == MEMBERS
    assert found.manifest["text"] == VALUES["text"]


def mutations(original: bytes) -> st.SearchStrategy[bytes]:
    """Draw what disks, networks and people do to files."""
    place = st.integers(0, len(original) - 1)
    pair = st.tuples(place, place).map(sorted)
    flipped = st.lists(st.tuples(place, st.integers(1, 255)), min_size=1, max_size=8).map(
        lambda flips: _flipped(original, flips)
    )
    return st.one_of(
        flipped,
        place.map(lambda end: original[:end]),
        place.map(lambda start: original[start:]),
        pair.map(lambda cut: original[: cut[0]] + original[cut[1] :]),
        pair.map(lambda cut: original[: cut[0]] + bytes(cut[1] - cut[0]) + original[cut[1] :]),
        pair.map(lambda cut: original[cut[0] :] + original[: cut[0]]),
        st.tuples(place, st.binary(min_size=1, max_size=64)).map(
            lambda put: original[: put[0]] + put[1] + original[put[0] :]
        ),
    )


def _flipped(original: bytes, flips: list[tuple[int, int]]) -> bytes:
    content = bytearray(original)
    for place, bits in flips:
        content[place] ^= bits
    return bytes(content)


def test_the_archive_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked is what is used, also if the file is replaced meanwhile."""
    opened: list[Any] = []
    init = zipfile.ZipFile.__init__

    def counting(self: zipfile.ZipFile, name: Any, *args: Any, **kwargs: Any) -> None:
        opened.append(name)
        init(self, name, *args, **kwargs)

    monkeypatch.setattr(zipfile.ZipFile, "__init__", counting)

    read_model_file(file)

    assert opened == [file]
