"""Reading of untrusted files, with a limit on their size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trappm.profiler.errors import InputError


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
