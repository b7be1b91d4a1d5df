"""NumPy arrays as bytes and back, without pickle and without trust in headers."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_ARCHIVE_BYTES = 16 << 20


def pack(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return a compressed archive of these arrays; equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **dict(arrays))  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(
    data: bytes,
    kinds: Mapping[str, npt.DTypeLike],
    max_array_bytes: int,
    optional: Mapping[str, npt.DTypeLike] = MappingProxyType({}),
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of these names and types from what `pack` wrote, and the optional ones it has.

    Raises:
        Exception: of many kinds, as zipfile, zlib and NumPy find damage; ValueError for an archive
            or array that is larger than it may be, or of another type.
    """
    if len(data) > MAX_ARCHIVE_BYTES:
        raise ValueError(f"{len(data)} bytes, of at most {MAX_ARCHIVE_BYTES}")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        there = {name.removesuffix(".npy") for name in archive.namelist()}
        wanted = {**kinds, **{name: optional[name] for name in optional.keys() & there}}
        return {name: _read(archive, name, kind, max_array_bytes) for name, kind in wanted.items()}


def _read(
    archive: zipfile.ZipFile, name: str, kind: npt.DTypeLike, max_bytes: int
) -> npt.NDArray[Any]:
    entry = archive.getinfo(f"{name}.npy")
    if entry.file_size > max_bytes:
        raise ValueError(f"{name} takes {entry.file_size} bytes, of at most {max_bytes}")
    with archive.open(entry) as stream:
        content = io.BytesIO(stream.read(entry.file_size))
    if np.lib.format.read_magic(content) != (1, 0):
        raise ValueError(f"{name} is in an unknown version of NumPy's format")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(content)
    if dtype != np.dtype(kind):
        raise ValueError(f"{name} is of type {dtype}, not {np.dtype(kind)}")
    values: npt.NDArray[Any] = np.frombuffer(content.read(), dtype=dtype)
    return values.reshape(shape, order="F" if by_column else "C")
