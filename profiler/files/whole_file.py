"""Writing of files that appear only when they are complete.

A file is written under another name in the same folder and renamed at the end. Parts that a killed
process left behind are removed by the next writer: an active writer holds a lock on its part.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SUFFIX = ".trappm-part"
_BESIDE = ("-journal", "-wal", "-shm")
"""Suffixes of files that SQLite writes next to a database."""


@contextmanager
def made_whole(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a new file to write into, which is renamed to `path` at the end without errors.

    Args:
        path: Final name.
        replace: Whether to replace a file of this name; FileExistsError is raised otherwise.

    Raises:
        OSError: The file cannot be written.
    """
    _clear(path.parent)
    part = path.with_name(f".{secrets.token_hex(8)}{_SUFFIX}")
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with suppress(OSError):  # a file system without locks: then nothing is cleared there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield part
        os.fsync(descriptor)
        if replace:
            part.replace(path)
        else:
            os.link(part, path)
        _sync(path.parent)
    finally:
        _remove(part)
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for part in folder.glob(f".*{_SUFFIX}"):
        with suppress(OSError):  # the file belongs to another process, or was removed
            descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(part)
            finally:
                os.close(descriptor)


def _remove(part: Path) -> None:
    for rest in ("", *_BESIDE):
        part.with_name(part.name + rest).unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # some network file systems sync no folder
        os.fsync(descriptor)
    os.close(descriptor)
