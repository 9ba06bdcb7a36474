"""Replaces a file as a whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from versatil_core.errors import ModelFileError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of ``path`` if the block ends well.

    It is written beside ``path`` under another name, brought to the disk, and renamed. Whatever
    ends the block early, Ctrl-C included, leaves what was there before. A symbolic link stays a
    link, to the new content; permissions of an older file are kept.

    Args:
        path: The file. Its folder must exist.

    Yields:
        The new file, open for writing.

    Raises:
        ModelFileError: The system refuses: no such folder, no permission, a full disk. Or ``path``
            is no file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ModelFileError(
            f"{path} cannot be written: it is a folder, a device or a pipe, which a file would replace",
            path=str(path),
        )
    # Short, since the name of the target may already be as long as names can be.
    temporary = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(target, temporary)
        temporary.replace(target)
        _bring_to_disk(target.parent)
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be written: {error}. What was there before is unchanged",
            path=str(path),
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _bring_to_disk(folder: Path) -> None:
    """Make a rename survive a power cut, where the system lets folders be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
