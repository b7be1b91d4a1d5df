"""NumPy arrays as bytes and back, without pickled objects."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


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
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return dict(archive)
