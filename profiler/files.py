"""Reading files that anyone may have written, and writing files that are whole or not there.

Untrusted files are read with a limit on their size, and without pickled objects. PyYAML raises
various exceptions for bad dates and numbers, takes the last of two equal keys, and expands merge
keys (`<<`), so that two kilobytes can fill all memory. Here these are errors.

A whole file is written under another name in the same folder and renamed at the end. Parts that a
killed process left behind are removed by the next writer: an active writer holds a lock on its
part.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from trappm.profiler.errors import InputError, TrappmError, one_line


def read_plain(path: Path, max_bytes: int) -> bytes:
    """Return the content of a plain file; reading a pipe or a device might never end.

    Raises:
        InputError: The file cannot be read, is not a plain file, is larger than `max_bytes`, or
            grows.
    """
    try:
        # Without the flag, opening a pipe would wait for somebody to write.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"cannot read {path}: it is not a plain file")
            if status.st_size > max_bytes:
                raise InputError(f"{path} has {status.st_size:,} bytes; at most {max_bytes:,}")
            # Not `max_bytes`: as much memory as is asked for is taken beforehand.
            content = file.read(status.st_size + 1)
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot read {path}: {reason}") from error
    if len(content) > status.st_size:
        raise InputError(f"{path} grows while it is read; try again when it is whole")
    return content


def load_yaml(text: str | bytes, origin: str) -> Any:
    """Return the plain data in a YAML text.

    Args:
        text: Content of the file.
        origin: Name of the file for errors.

    Raises:
        InputError: It is not YAML, or has a key twice.
    """
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, OverflowError) as error:
        where = re.sub(
            r' in "<[a-z ]+>",', " at", " ".join(str(error).split())
        )  # PyYAML's own name
        raise InputError(f"{origin} is not valid YAML: {where}") from error


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not supported",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem="merge keys (<<) are not supported", problem_mark=key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"duplicate key {key!r}", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def pack(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return a compressed archive of these arrays; equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **dict(arrays))  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `pack` wrote.

    Raises:
        Exception: The bytes are damaged; zipfile, zlib and NumPy raise errors of many kinds.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:  # noqa: TID251
        return dict(archive)


@contextmanager
def report_damage(what: str) -> Iterator[None]:
    """Turn the many errors of damaged bytes into a TrappmError that names the kind of profile."""
    try:
        yield
    except Exception as error:
        raise TrappmError(
            f"a stored {what} is damaged ({one_line(error)}); profile the model again"
        ) from error


_SUFFIX = ".trappm-part"
_BESIDE = ("-journal", "-wal", "-shm")
"""Suffixes of files that SQLite writes next to a database."""


@contextmanager
def write_atomically(path: Path, *, replace: bool) -> Iterator[Path]:
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
