"""`trappm.LabelStore`: the labels of a store as a DataFrame, and stores that commands read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from trappm.store import Home, Store


class LabelStore:
    """A label store to read.

    >>> store = LabelStore()
    >>> largest = store.labels(phase="train", sort="-memory_mib", limit=10)
    >>> failed = store.labels(outcome="oom", since="7d", columns=["architecture", "message"])
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
        architecture: str | None = None,
        family: str | None = None,
        device: str | None = None,
        batch_size: int | None = None,
        input_size: int | None = None,
        precision: str | None = None,
        memory_format: str | None = None,
        optimizer: str | None = None,
        phase: str | None = None,
        execution: str | None = None,
        protocol: str | None = None,
        metric: str | None = None,
        outcome: str | None = None,
        provenance: str | None = None,
        campaign: str | None = None,
        since: str | None = None,
        until: str | None = None,
        columns: str | Sequence[str] | None = None,
        sort: str = "architecture",
        limit: int | None = None,
    ) -> pd.DataFrame:
        """Return labels, or attempts to measure, one per row.

        Args:
            architecture: Name of an architecture, or a glob such as `resnet*`.
            family: Family of architectures, such as `resnet`.
            device: Key of a device, such as `a100`.
            batch_size: Samples per step.
            input_size: Pixels, or tokens of a transformer.
            precision: fp32, amp-fp16, amp-bf16 or bf16.
            memory_format: contiguous or channels-last.
            optimizer: sgd, momentum, adam or adamw.
            phase: train or infer.
            execution: eager or compile.
            protocol: Name of a measuring protocol.
            metric: Only labels with this metric, such as `power_w`.
            outcome: Attempts with this outcome, or `any`, instead of labels.
            provenance: measured, imported or simulated.
            campaign: Id of a campaign, or its beginning.
            since: ISO 8601 date or time, in UTC by default, or an age such as `7d`.
            until: The same; a date includes that day.
            columns: Columns to return (default: all of `trappm labels query`).
            sort: Column to sort by; with a leading `-` in descending order. Missing values are
                last.
            limit: Maximum number of rows.

        Returns:
            A frame in which times are in UTC and missing values are NaN or None.

        Raises:
            InputError: There is no label store, or a filter, column or name is unknown.
            StoreError: The label store cannot be read.
        """
        from trappm.store import LabelFilter, Store

        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise InputError(f"limit is {limit!r}; give a number of rows, such as 10")
        wanted = LabelFilter(
            architecture=architecture,
            family=family,
            device=device,
            batch_size=batch_size,
            input_size=input_size,
            precision=precision,
            memory_format=memory_format,
            optimizer=optimizer,
            phase=phase,
            execution=execution,
            protocol=protocol,
            metric=metric,
            outcome=outcome,
            provenance=provenance,
            campaign=campaign,
            since=since,
            until=until,
        )
        names = [columns] if isinstance(columns, str) else columns
        with store_to_read() if self._url is None else Store.open_to_read(self._url) as store:
            return store.labels.query(wanted, columns=names, sort=sort, limit=limit)


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


def without_nan(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame of objects, in which missing values are None."""
    return frame.astype(object).where(frame.notna(), None)
