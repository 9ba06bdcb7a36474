"""A file is replaced whole or not at all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from versatil_core import ModelFileError
from versatil_core.atomic_file import replacing


def write(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def test_it_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"

    for content in (b"one", b"two"):
        write(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_keeps_the_old_file(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise failure

    with pytest.raises(ModelFileError if isinstance(failure, OSError) else type(failure)):
        fail()

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_process_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = (
        "import signal, sys, time; from versatil_core.atomic_file import replacing\n"
        # Whoever starts the tests in the background lets them ignore Ctrl-C.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with replacing(sys.argv[1]) as file:\n"
        "    file.write(b'half' * 100_000); file.flush(); print('half', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"

    process.send_signal(signal.SIGINT)
    process.communicate()

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere.* cannot be written.*unchanged") as error:
        write(tmp_path / "nowhere" / "file", b"")

    assert error.value.path == str(tmp_path / "nowhere" / "file")


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ModelFileError, match="a folder, a device or a pipe"):
            write(path, b"")

    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "target"
    target.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(target)

    write(link, b"new")

    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_permissions_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"old")
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert path.stat().st_mode == ordinary.stat().st_mode

    path.chmod(0o600)
    write(path, b"new")

    assert path.stat().st_mode & 0o777 == 0o600


def test_the_longest_name_there_is(tmp_path: Path) -> None:
    path = tmp_path / ("x" * os.pathconf(tmp_path, "PC_NAME_MAX"))

    write(path, b"new")

    assert path.read_bytes() == b"new"


def test_another_process_never_sees_half(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"a" * 1000)

    with replacing(path) as file:
        file.write(b"b" * 500)
        file.flush()
        assert path.read_bytes() == b"a" * 1000
        file.write(b"b" * 500)

    assert path.read_bytes() == b"b" * 1000
