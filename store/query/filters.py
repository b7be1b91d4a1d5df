"""Filters of labels and attempts, and the columns that both have.

Values go into SQL as parameters, never as text, and names of columns are looked up here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from trappm.profiler.errors import InputError
from trappm.profiler.nearest import nearest
from trappm.profiler.records import (
    MAX_SIZE,
    METRICS,
    MemoryFormat,
    Optimizer,
    Outcome,
    Phase,
    Precision,
    Provenance,
)
from trappm.store.db.models import (
    AssignmentLabelRow,
    AssignmentRow,
    CampaignRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
)
from trappm.store.query.dates import point_in_time
from trappm.store.query.known_names import architectures_matching, is_glob, known_names

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
