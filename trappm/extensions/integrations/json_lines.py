"""An append-only file of measurements as JSON lines; each is on the disk before `append` returns.

One process at a time writes to a file. An incomplete last line, of a writer that was killed, is
removed when the file is opened again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from trappm.profiler.errors import InputError, TrappmError, one_line
from trappm.profiler.records import Measurement


class JsonLines:
    """File of measurements; `earlier` holds the existing ones.

    Raises:
        InputError: The file cannot be opened, is locked by another writer, or has an invalid line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise InputError(f"cannot write results to {path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise InputError(f"{path} is not a file; give a file for the results")
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.earlier = tuple(self._read())
        except BlockingIOError as error:
            self.close()
            raise InputError(f"another process is writing to {path}; name another file") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def append(self, record: Measurement) -> None:
        """Write a record to the disk, or leave the file as it was.

        Raises:
            TrappmError: The disk is full, or failed.
        """
        data = json.dumps(record.to_dict()).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):  # the next opening cuts it off as well
                os.ftruncate(self._descriptor, size)
            raise TrappmError(
                f"cannot write to {self._path}: {error.strerror}; all lines but this last one are "
                "there: make room and run it again"
            ) from error

    def _read(self) -> Iterator[Measurement]:
        end = 0
        with open(os.dup(self._descriptor), "rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = Measurement.from_dict(json.loads(line))
                except (InputError, TypeError, ValueError, KeyError, RecursionError) as error:
                    if self._is_torn(line):
                        os.ftruncate(self._descriptor, end)
                        return
                    raise InputError(
                        f"line {number} of {self._path} is not a Measurement "
                        f"({one_line(error)}); give another file for the results, or fix this one"
                    ) from error
                if not line.endswith(b"\n"):
                    os.write(self._descriptor, b"\n")  # complete, but without a line end
                end += len(line)
                yield record

    def _is_torn(self, line: bytes) -> bool:
        """Return whether a line is the beginning of one of our records."""
        begin = f'{{"{dataclasses.fields(Measurement)[0].name}": '.encode()
        return not line.endswith(b"\n") and line[: len(begin)] == begin[: len(line)]
