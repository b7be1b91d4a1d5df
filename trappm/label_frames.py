"""`trappm.labels`: the label store as a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from trappm.call_arguments import checked_call, unknown_argument
from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from trappm.store import Home, Store


@checked_call
def labels(
    *,
    by: str | Sequence[str] = (),
    statistics: str | Sequence[str] = (),
    columns: str | Sequence[str] | None = None,
    sort: str | None = None,
    limit: int | None = None,
    **filters: Any,
) -> pd.DataFrame:
    """Labels (or attempts to measure), or statistics of them by group.

    >>> trappm.labels(family="resnet", device="a100", sort="-memory_mib", limit=10)
    >>> trappm.labels(device="a100", by="family", statistics=["count", "median", "p95"])
    >>> trappm.labels(outcome="oom", since="7d", columns=["architecture", "batch_size", "message"])

    Args:
        by: column or columns whose values make a group, for statistics.
        statistics: count, mean, std, min, median, max, p1 to p99; count and mean by default.
        columns: one or more; of statistics, the metrics that they are of.
        sort: a column; with a leading `-` the largest first, missing values last.
        limit: rows at most.
        filters: architecture (a name or glob), family, device, batch_size, input_size, precision,
            memory_format, optimizer, phase, protocol, metric, outcome (or `any`; gives
            attempts), provenance, campaign, since, until: as `store.LabelFilter`.

    Returns:
        One row for each label, in the columns of `trappm labels query`. Times are in UTC, what is
        missing is NaN or None.

    Raises:
        InputError: there is no label store, or no such column, statistic, filter or name.
        StoreError: the label store cannot be read.
    """
    from trappm.store import LabelFilter
    from trappm.store.query.tables import check_columns, check_statistics

    known = [field.name for field in fields(LabelFilter)]
    for name in filters:
        if name not in known:
            raise unknown_argument(labels, name, known)
    if limit is not None and (not isinstance(limit, int) or limit < 0):
        raise InputError(f"limit is {limit!r}; give a number of rows, such as 10")
    wanted = LabelFilter(**filters)
    by, statistics = _names(by), _names(statistics)
    columns = None if columns is None else _names(columns)
    if by or statistics:
        statistics = statistics or ("count", "mean")
        check_statistics(wanted, by, statistics, columns, sort)  # before there need be a store
        with store_to_read() as store:
            return store.labels.summarize(
                wanted, by=by, statistics=statistics, columns=columns, sort=sort, limit=limit
            )
    sort = sort or "architecture"
    check_columns(wanted, columns, sort)
    with store_to_read() as store:
        return store.labels.query(wanted, columns=columns, sort=sort, limit=limit)


def _names(value: str | Sequence[str]) -> Sequence[str]:
    """Return names as given; a string is one name."""
    return (value,) if isinstance(value, str) else value


def store_to_read(home: Home | None = None) -> Store:
    """The label store of the data folder, which need not be writable; nothing is made.

    Raises:
        NoLabelStoreError: there is none yet.
        StoreError: it cannot be read.
    """
    from trappm.store import Home, Store

    return Store.open_to_read((home or Home.find()).database_url)


def store_or_none_yet(home: Home) -> Store:
    """The label store for lists: as `store_to_read`, and an empty one in memory where none exists.

    Raises:
        StoreError: it cannot be read.
    """
    from trappm.store import NoLabelStoreError, Store

    try:
        return store_to_read(home)
    except NoLabelStoreError:
        return Store.open("sqlite://")


def records(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Each row by column; what is missing is None."""
    names = list(frame.columns)
    clean = frame.astype(object).where(frame.notna(), None)
    for row in clean.itertuples(index=False, name=None):
        yield dict(zip(names, row, strict=True))
