"""What is in the store, and how much room it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, func, select, text

from trappm.store.db.engine import address
from trappm.store.db.migrate import REVISIONS
from trappm.store.db.models import DeviceRow, LabelRow, MeasurementRow
from trappm.store.maintenance.backup import row_counts


@dataclass(frozen=True, kw_only=True)
class LabelCount:
    """Labels of one device (all its stacks), provenance and protocol."""

    device: str
    provenance: str
    protocol: str
    labels: int
    censored: int
    """So many of them know a bound of the memory only."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The store at one point in time; times are ISO 8601 in UTC, None where there is no row."""

    address: str
    schema: str
    size_bytes: int
    """On disk; of SQLite with its log, of PostgreSQL the whole database."""
    bytes_per_label: float | None
    """The size by the number of labels, everything else that is stored included."""
    rows: dict[str, int]
    """By table."""
    labels: tuple[LabelCount, ...]
    oldest_measurement: str | None
    newest_measurement: str | None
    oldest_label: str | None
    newest_label: str | None


def stats_of(connection: Connection) -> Stats:
    """Counts what this transaction sees."""
    rows = row_counts(connection)
    size = _size_bytes(connection)
    times = (MeasurementRow.started_at, LabelRow.created_at)
    ends = [connection.scalar(select(end(t))) for t in times for end in (func.min, func.max)]
    counts = [LabelCount(**row) for row in connection.execute(_LABELS).mappings()]
    labels = rows["labels"]
    return Stats(
        address=address(connection.engine),
        schema=REVISIONS[-1],
        size_bytes=size,
        bytes_per_label=size / labels if labels else None,
        rows=rows,
        labels=tuple(counts),
        oldest_measurement=ends[0],
        newest_measurement=ends[1],
        oldest_label=ends[2],
        newest_label=ends[3],
    )


def _size_bytes(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        return connection.scalar(text("SELECT pg_database_size(current_database())")) or 0
    _, _, path = connection.exec_driver_sql("PRAGMA database_list").all()[0]
    file = Path(path)
    beside = (file, file.with_name(f"{file.name}-wal"))
    return sum(path.stat().st_size for path in beside if path.exists())


_OF = {
    "device": DeviceRow.key,
    "provenance": LabelRow.provenance,
    "protocol": LabelRow.protocol_name,
}
_COUNTS = {"labels": func.count(), "censored": func.count(LabelRow.memory_above_mib)}
_LABELS = (
    select(*(column.label(name) for name, column in (_OF | _COUNTS).items()))
    .join(DeviceRow, DeviceRow.id == LabelRow.device_id)
    .group_by(*_OF.values())
    .order_by(*_OF.values())
)
