"""Data frames as plain rows, for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def records(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Each row by column; what is missing is None."""
    names = list(frame.columns)
    clean = frame.astype(object).where(frame.notna(), None)
    for row in clean.itertuples(index=False, name=None):
        yield dict(zip(names, row, strict=True))
