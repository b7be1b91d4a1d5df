"""`trappm.LabelStore`: the labels of a store as a DataFrame, and stores that commands read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from trappm.store import Home, Store


MAX_PAGE = 200
"""Largest number of rows that a server returns at once."""


class LabelStore:
    """A label store to read.

    >>> store = LabelStore()
    >>> largest = store.labels(phase="train", sort="-memory_mib", limit=10)
    >>> failed = store.labels(outcome="oom", since="7d", columns=["architecture", "message"])
    >>> above = store.labels(where="step_time_ms > 100", columns="architecture, step_time_ms")
    >>> slow = store.labels().groupby("family").step_time_ms.quantile(0.95)
    """

    def __init__(self, url: str | None = None) -> None:
        """Name the store; it is opened by each query.

        Args:
            url: SQLAlchemy URL, such as postgresql+psycopg://user@host/labels (default:
                TRAPPM_DATABASE, or labels.db in the data folder).
        """
        self._url = url

    def labels(
        self,
        *,
        columns: str | Sequence[str] | None = None,
        sort: str = "architecture",
        limit: int | None = None,
        **filters: Any,
    ) -> pd.DataFrame:
        """Return labels, or attempts to measure, one per row.

        Args:
            columns: Columns to return, or their names separated by commas (default: all).
            sort: Column to sort by; with a leading `-` in descending order. Missing values are
                last.
            limit: Maximum number of rows.
            **filters: Fields of `trappm.store.LabelFilter`, such as `family`, `since` and `where`.

        Returns:
            A frame in which times are in UTC and missing values are NaN or None.

        Raises:
            InputError: There is no label store, or a filter, column or name is unknown.
            StoreError: The label store cannot be read.
        """
        from trappm.store import LabelFilter, Store

        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise InputError(f"limit is {limit!r}; give a number of rows, such as 10")
        wanted = LabelFilter(**filters)
        names = column_names(columns) if isinstance(columns, str) else columns
        with store_to_read() if self._url is None else Store.open_to_read(self._url) as store:
            return store.labels.query(wanted, columns=names, sort=sort, limit=limit)


def column_names(text: str | None) -> list[str]:
    """Return the names in a text that commas separate; none for no text."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def store_to_read(home: Home | None = None) -> Store:
    """Open the label store of a data folder, which need not be writable, for reading.

    Raises:
        NoLabelStoreError: There is none yet.
        StoreError: It cannot be read.
    """
    from trappm.store import Home, Store

    return Store.open_to_read((home or Home.find()).database_url)


def store_or_none_yet(home: Home) -> Store:
    """Open the same store, or an empty one in memory if there is none yet.

    Raises:
        StoreError: It cannot be read.
    """
    from trappm.store import NoLabelStoreError, Store

    try:
        return store_to_read(home)
    except NoLabelStoreError:
        return Store.open("sqlite://")


def records(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Return each row as a dictionary, in which missing values are None."""
    names = list(frame.columns)
    for row in without_nan(frame).itertuples(index=False, name=None):
        yield dict(zip(names, row, strict=True))


def with_iso_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with its times as texts in ISO 8601."""
    times = {
        str(name): frame[name].map(lambda time: time.isoformat())
        for name in frame.select_dtypes("datetimetz")
    }
    return frame.assign(**times)


def without_nan(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame of objects, in which missing values are None."""
    return frame.astype(object).where(frame.notna(), None)
