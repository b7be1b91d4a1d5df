"""Labels and attempts: filters, records and tables.

Values go into SQL as parameters, never as text, and names of columns are looked up here.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Row, Select, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from trappm.profiler.errors import InputError
from trappm.profiler.nearest import nearest
from trappm.profiler.records import (
    MAX_SIZE,
    METRICS,
    Configuration,
    MemoryFormat,
    Optimizer,
    Outcome,
    Pair,
    Phase,
    Precision,
    Provenance,
)
from trappm.profiler.records.step_scope import IN_TRAINING
from trappm.store.assignments import AS_PLANNED
from trappm.store.records import LabelRecord
from trappm.store.schema import (
    AssignmentLabelRow,
    AssignmentRow,
    CampaignRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
)
from trappm.store.transactions import Repository, reading
from trappm.store.workloads import configuration_of

if TYPE_CHECKING:
    import pandas as pd

_AGE = re.compile(r"([0-9]{1,6})([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def point_in_time(text: str, *, end_of_day: bool = False) -> str:
    """The point in time in ISO 8601 with its zone, which is UTC unless the text names another.

    Args:
        text: an ISO 8601 date or time, or an age such as `7d` (minutes, hours, days, weeks).
        end_of_day: what a date alone means: its end, not its beginning.

    Raises:
        InputError: it is neither.
    """
    age = _AGE.fullmatch(text)
    try:
        if age:
            return (datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})).isoformat()
        if re.fullmatch(r"[0-9-]{8,10}", text):
            day = time.max if end_of_day else time.min
            return datetime.combine(date.fromisoformat(text), day, UTC).isoformat()
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        return moment.astimezone(UTC).isoformat()
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{text!r} is no time; give an ISO date such as 2026-11-21, or an age such as 7d"
        ) from error


def known_names(session: Session, column: InstrumentedAttribute[str]) -> list[str]:
    """All values of a column, each once, sorted as the database sorts; quick if it is indexed."""
    names = select(func.min(column).label("name")).cte("names", recursive=True)
    following = select(func.min(column)).where(column > names.c.name).scalar_subquery()
    names = names.union_all(select(following).where(names.c.name.is_not(None)))
    return list(session.scalars(select(names.c.name).where(names.c.name.is_not(None))))


def architectures_matching(session: Session, pattern: str) -> list[str]:
    """The architectures of this name or glob.

    A glob is matched here, so that it means the same as in a pool on every back end, and `%` or `_`
    mean themselves.
    """
    if not is_glob(pattern):
        return [pattern]
    known = known_names(session, ConfigurationRow.architecture)
    return [name for name in known if fnmatch.fnmatchcase(name, pattern)]


def is_glob(pattern: str) -> bool:
    return bool(set(pattern) & set("*?["))


ANY_OUTCOME = "any"
"""As an outcome in a filter: all attempts, however they ended."""


@dataclass(frozen=True, kw_only=True)
class LabelFilter:
    """Which labels are wanted; a field that is None does not restrict.

    Raises:
        InputError: a setting, metric, outcome or provenance is none that there is, or a time cannot
            be read.
    """

    architecture: str | None = None
    """A name, or a glob with `*`, `?` and `[...]`."""
    family: str | None = None
    device: str | None = None
    batch_size: int | None = None
    input_size: int | None = None
    precision: str | None = None
    memory_format: str | None = None
    optimizer: str | None = None
    phase: str | None = None
    protocol: str | None = None
    metric: str | None = None
    """Only those that have it."""
    outcome: Outcome | str | None = None
    """Attempts that ended so (or `any`) are wanted, instead of labels."""
    provenance: Provenance | str | None = None
    campaign: str | None = None
    """Its id, or the beginning of it."""
    since: str | None = None
    """When the label was made, or the attempt begun: from this time on. As `until`, an ISO 8601
    date or time (UTC unless it names a zone), or an age such as `7d` (m, h, d, w)."""
    until: str | None = None
    """Up to this time; a date means up to its end."""

    def __post_init__(self) -> None:
        choices: dict[str, Sequence[str]] = {
            "precision": list(Precision),
            "memory_format": list(MemoryFormat),
            "optimizer": list(Optimizer),
            "phase": list(Phase),
            "metric": [*METRICS, "energy_j"],
            "outcome": [*Outcome, ANY_OUTCOME],
            "provenance": list(Provenance),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise InputError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        for name in ("batch_size", "input_size"):
            size = getattr(self, name)
            if size is not None and not (isinstance(size, int) and 1 <= size <= MAX_SIZE):
                raise InputError(f"{name} is {size!r}; it must be from 1 to {MAX_SIZE:,}")
        for text in (self.since, self.until):
            if text is not None:
                point_in_time(text)


Query = Select[*tuple[Any, ...]]
Columns = Mapping[str, InstrumentedAttribute[Any]]

_WORKLOAD: Columns = {
    "architecture": ConfigurationRow.architecture,
    "family": ConfigurationRow.family,
    "batch_size": ConfigurationRow.batch_size,
    "input_size": ConfigurationRow.input_size,
    "precision": ConfigurationRow.precision,
    "memory_format": ConfigurationRow.memory_format,
    "optimizer": ConfigurationRow.optimizer,
    "phase": ConfigurationRow.phase,
    "device": DeviceRow.key,
    "fingerprint": DeviceRow.fingerprint,
}
LABEL_COLUMNS: Columns = {
    "id": LabelRow.id,
    **_WORKLOAD,
    "protocol": LabelRow.protocol_name,
    "step_time_ms": LabelRow.step_time_ms,
    "memory_mib": LabelRow.memory_mib,
    "memory_above_mib": LabelRow.memory_above_mib,
    "power_w": LabelRow.power_w,
    "energy_j": LabelRow.energy_j,
    "provenance": LabelRow.provenance,
    "created_at": LabelRow.created_at,
}
ATTEMPT_COLUMNS: Columns = {
    "id": MeasurementRow.id,
    **_WORKLOAD,
    "protocol": MeasurementRow.protocol_name,
    "outcome": MeasurementRow.outcome,
    "step_time_ms": MeasurementRow.step_median_ms,
    "memory_mib": MeasurementRow.memory_mib,
    "power_w": MeasurementRow.power_w,
    "energy_j": MeasurementRow.energy_j,
    "provenance": MeasurementRow.provenance,
    "campaign": MeasurementRow.campaign_id,
    "started_at": MeasurementRow.started_at,
    "duration_s": MeasurementRow.duration_s,
    "failed_in": MeasurementRow.failed_in,
    "message": MeasurementRow.message,
}

_EQUAL = (
    "family", "device", "batch_size", "input_size", "precision", "memory_format", "optimizer",
    "phase", "protocol", "provenance",
)  # fmt: skip
"""Filters that restrict the column of their name to one value."""


def columns_of(wanted: LabelFilter) -> Columns:
    return LABEL_COLUMNS if wanted.outcome is None else ATTEMPT_COLUMNS


def matching(session: Session, wanted: LabelFilter, what: Sequence[Any]) -> Query:
    """Selects this from the labels or attempts that pass the filter."""
    row = LabelRow if wanted.outcome is None else MeasurementRow
    return restricted(session, joined(row, what), wanted)


def joined(row: type[LabelRow | MeasurementRow], what: Sequence[Any]) -> Query:
    """Selects this from labels or attempts, each with its configuration and its device."""
    return (
        select(*what)
        .select_from(row)
        .join(ConfigurationRow, ConfigurationRow.id == row.configuration_id)
        .join(DeviceRow, DeviceRow.id == row.device_id)
    )


def restricted(session: Session, query: Query, wanted: LabelFilter) -> Query:
    """The query, of labels or attempts with configurations and devices, with these conditions."""
    columns = columns_of(wanted)
    for name in _EQUAL:
        value = getattr(wanted, name)
        if value is not None:
            query = query.where(columns[name] == value)
    if wanted.outcome not in {None, ANY_OUTCOME}:
        query = query.where(MeasurementRow.outcome == wanted.outcome)
    if wanted.architecture is not None:
        names = architectures_matching(session, wanted.architecture)
        query = query.where(ConfigurationRow.architecture.in_(names))
    if wanted.metric is not None:
        query = query.where(columns[wanted.metric].is_not(None))
    time = columns["created_at" if wanted.outcome is None else "started_at"]
    if wanted.since is not None:
        query = query.where(time >= point_in_time(wanted.since))
    if wanted.until is not None:
        query = query.where(time <= point_in_time(wanted.until, end_of_day=True))
    if wanted.campaign is not None and wanted.outcome is not None:
        query = query.where(MeasurementRow.campaign_id.startswith(wanted.campaign, autoescape=True))
    elif wanted.campaign is not None:
        query = query.where(
            LabelRow.id.in_(
                select(AssignmentLabelRow.label_id)
                .join(AssignmentRow, AssignmentRow.id == AssignmentLabelRow.assignment_id)
                .where(AssignmentRow.campaign_id.startswith(wanted.campaign, autoescape=True))
            )
        )
    return query


def refuse_unknown_names(session: Session, wanted: LabelFilter) -> None:
    """Raises InputError for the first name in the filter that the store does not know at all."""
    columns = {
        "device": DeviceRow.key,
        "family": ConfigurationRow.family,
        "campaign": CampaignRow.id,
        "architecture": ConfigurationRow.architecture,
        "protocol": MeasurementRow.protocol_name,
    }
    for what, column in columns.items():
        name = getattr(wanted, what)
        if name is None:
            continue
        if what == "architecture" and is_glob(name):
            if not architectures_matching(session, name):
                raise InputError(f"no architecture of the label store matches {name!r}")
            continue
        is_there = column == name
        if what == "campaign":  # an id, or its beginning
            is_there = column.startswith(name, autoescape=True)
            alike = sorted(session.scalars(select(column).where(is_there)))
            if len(alike) > 1:
                raise InputError(f"campaign {name!r} may be {' or '.join(alike[:10])}; name one")
        if session.scalar(select(column).where(is_there).limit(1)) is not None:
            continue
        known = known_names(session, column)
        raise InputError(f"the label store knows no {what} {name!r}; {nearest(name, known)}")


_NUMBERS = (*METRICS, "memory_above_mib", "energy_j", "duration_s")
_TIMES = ("created_at", "started_at")


def check_columns(wanted: LabelFilter, columns: Sequence[str] | None, sort: str) -> None:
    """Raises InputError unless `store.labels.query` knows these columns."""
    known = columns_of(wanted)
    _check_names("sort by", [sort.removeprefix("-")], known)
    _check_names("show", columns or known, known)


def _check_names(doing: str, names: Iterable[str], known: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise InputError(f"cannot {doing} {name!r}; there is {', '.join(known)}")
        if name in seen:
            raise InputError(f"cannot {doing} {name!r} twice")
        seen.add(name)


def frame_of(rows: Sequence[Any], columns: list[str]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame.from_records([tuple(row) for row in rows], columns=columns)
    for name in columns:
        if name in _NUMBERS:
            frame[name] = frame[name].astype("float64")
        elif name in _TIMES:
            frame[name] = pd.to_datetime(frame[name], utc=True, format="ISO8601")
        elif name in {"provenance", "outcome"}:
            frame[name] = frame[name].map(str)
    return frame


class Labels(Repository):
    """Labels, as records for heads to learn from and as tables for people."""

    @reading
    def matching(self, session: Session, wanted: LabelFilter | None = None) -> list[LabelRecord]:
        """The labels that pass the filter, in the order in which they were made.

        Raises:
            InputError: the filter names an outcome: those are attempts, for `query`.
        """
        wanted = wanted or LabelFilter()
        if wanted.outcome is not None:
            raise InputError(
                "labels have no outcome; attempts have, and come from: store.labels.query"
            )
        query = restricted(session, joined(LabelRow, _WHOLE_LABEL), wanted)
        return [_label(row) for row in session.execute(query.order_by(LabelRow.id))]

    @reading
    def of_campaign(
        self,
        session: Session,
        campaign_id: str,
    ) -> list[LabelRecord]:
        """The labels of a campaign's assignments, with their roles, as planned."""
        query = (
            joined(LabelRow, [*_WHOLE_LABEL, AssignmentRow.role])
            .join(AssignmentLabelRow, AssignmentLabelRow.label_id == LabelRow.id)
            .join(AssignmentRow, AssignmentRow.id == AssignmentLabelRow.assignment_id)
            .where(AssignmentRow.campaign_id == campaign_id)
            .order_by(*AS_PLANNED, AssignmentRow.device_key)
        )
        return [_label(row) for row in session.execute(query)]

    @reading
    def get(self, session: Session, label_id: int) -> LabelRecord:
        """The label of this id.

        Raises:
            InputError: there is none of this id.
        """
        query = joined(LabelRow, _WHOLE_LABEL).where(LabelRow.id == label_id)
        row = session.execute(query).one_or_none()
        if row is None:
            raise InputError(f"no label has the id {label_id}; see: trappm labels query")
        return _label(row)

    @reading
    def of_pairs(
        self, session: Session, pairs: Collection[Pair], what: Configuration, device: str
    ) -> list[LabelRecord]:
        """Labels of these architectures and input sizes on a device, under any stack and protocol
        but `in-training`: those steps were not measured alone.

        Args:
            pairs: of an architecture and an input size, which take the place of those of `what`.
            what: batch size, precision, memory format, optimizer and phase.
            device: its key.
        """
        wanted = set(pairs)
        query = (
            joined(LabelRow, _WHOLE_LABEL)
            .where(ConfigurationRow.architecture.in_(sorted({name for name, _ in wanted})))
            .where(DeviceRow.key == device, LabelRow.protocol_name != IN_TRAINING)
            .where(*_same_settings(what))
            .order_by(LabelRow.id)
        )
        labels = [_label(row) for row in session.execute(query)]
        return [
            label for label in labels
            if (label.configuration.architecture, label.configuration.input_size) in wanted
        ]  # fmt: skip

    @reading
    def pairs(
        self, session: Session, device: str | None = None, like: Configuration | None = None
    ) -> list[Pair]:
        """Architectures and input sizes with a label that is not simulated, each once.

        Args:
            device: its key; all devices without one.
            like: only labels of its batch size and settings.

        Raises:
            InputError: the store knows no such device; the error names the nearest.
        """
        row = ConfigurationRow
        query = _answering(select(row.architecture, row.input_size).distinct(), device)
        if like is not None:
            query = query.where(*_same_settings(like))
        pairs = [(name, size) for name, size in session.execute(query)]
        if not pairs:
            refuse_unknown_names(session, LabelFilter(device=device))
        return sorted(pairs)

    @reading
    def configurations(
        self, session: Session, architectures: Collection[str], device: str
    ) -> list[Configuration]:
        """What there is a label of that is not simulated, of these architectures on a device."""
        named = ConfigurationRow.architecture.in_(sorted(set(architectures)))
        query = _answering(select(ConfigurationRow).distinct(), device).where(named)
        return sorted(configuration_of(row) for row in session.scalars(query))

    @reading
    def query(
        self,
        session: Session,
        wanted: LabelFilter,
        *,
        columns: Sequence[str] | None = None,
        sort: str = "architecture",
        limit: int | None = None,
        offset: int = 0,
    ) -> pd.DataFrame:
        """A table of the labels that pass the filter, or of attempts if it names an outcome.

        Args:
            wanted: the filter.
            columns: which, in this order; all by default.
            sort: a column; with a leading `-` the largest first. Missing values come last.
            limit: rows at most.
            offset: so many rows are skipped at the beginning.

        Raises:
            InputError: there is no such column; or no label passes, and a name in the filter is not
                in the store.
        """
        check_columns(wanted, columns, sort)
        known = columns_of(wanted)
        chosen = list(columns or known)
        by = known[sort.removeprefix("-")]
        order = by.desc() if sort.startswith("-") else by.asc()
        if by.property.columns[0].nullable:  # else an index could not serve
            order = order.nulls_last()
        query = matching(session, wanted, [known[name].label(name) for name in chosen])
        query = query.order_by(order, known["id"]).limit(limit).offset(offset or None)
        rows = session.execute(query).all()
        if not rows:
            refuse_unknown_names(session, wanted)
        return frame_of(rows, chosen)

    @reading
    def count(self, session: Session, wanted: LabelFilter, *, at_most: int) -> int:
        """How many labels (or attempts) pass the filter; counting ends at `at_most`."""
        rows = matching(session, wanted, [columns_of(wanted)["id"]]).limit(at_most)
        return session.scalar(select(func.count()).select_from(rows.subquery())) or 0

    @reading
    def names(self, session: Session) -> dict[str, list[str]]:
        """The names that filters can name, by the field of `LabelFilter`, sorted."""
        columns = {
            "device": DeviceRow.key,
            "family": ConfigurationRow.family,
            "architecture": ConfigurationRow.architecture,
        }
        return {name: known_names(session, column) for name, column in columns.items()}

    @reading
    def attempts(self, session: Session, label_id: int) -> pd.DataFrame:
        """Every attempt at a label's configuration on its device and stack, the earliest first."""
        row, chosen = MeasurementRow, list(ATTEMPT_COLUMNS)
        query = (
            joined(row, [ATTEMPT_COLUMNS[name].label(name) for name in chosen])
            .join(
                LabelRow,
                (LabelRow.configuration_id == row.configuration_id)
                & (LabelRow.device_id == row.device_id),
            )
            .where(LabelRow.id == label_id)
            .order_by(row.started_at, row.id)
        )
        return frame_of(session.execute(query).all(), chosen)


_WHOLE_LABEL = (
    *LabelRow.__table__.columns,
    *(c for c in ConfigurationRow.__table__.columns if c.name not in {"id", "family"}),
    DeviceRow.key,
    DeviceRow.fingerprint,
)
"""Columns rather than entities, which take twice the time to read."""


def _answering(query: Query, device: str | None) -> Query:
    """The query of configurations with a label that was measured alone, and not simulated."""
    query = (
        query.join(LabelRow, LabelRow.configuration_id == ConfigurationRow.id)
        .join(DeviceRow, DeviceRow.id == LabelRow.device_id)
        .where(LabelRow.provenance != Provenance.SIMULATED)
        .where(LabelRow.protocol_name != IN_TRAINING)
    )
    return query if device is None else query.where(DeviceRow.key == device)


def _same_settings(what: Configuration) -> list[ColumnElement[bool]]:
    names = ("batch_size", "precision", "memory_format", "optimizer", "phase")
    return [getattr(ConfigurationRow, name) == getattr(what, name) for name in names]


def _label(row: Row[Any]) -> LabelRecord:
    return LabelRecord(
        id=row.id,
        configuration=configuration_of(row),
        device=row.key,
        fingerprint=row.fingerprint,
        protocol=row.protocol_name,
        step_time_ms=row.step_time_ms,
        memory_mib=row.memory_mib,
        memory_above_mib=row.memory_above_mib,
        power_w=row.power_w,
        energy_j=row.energy_j,
        provenance=row.provenance,
        measurement_id=row.measurement_id,
        created_at=row.created_at,
        role=getattr(row, "role", None),
    )
