"""Asking for labels, and taking over those that an earlier campaign paid for."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from profiler.errors import InputError
from profiler.records import METRICS, Outcome, Provenance
from store.campaigns import AS_PLANNED
from store.database import Database
from store.leases import end_lease
from store.records import AssignmentState, LabelRecord, Role
from store.schema import (
    AssignmentLabelRow,
    AssignmentRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
)
from store.workloads import configuration_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class LabelFilter:
    """Which labels are asked for; what is None does not restrict.

    Raises:
        InputError: the metric, outcome or provenance is none that there is.
    """

    architecture: str | None = None
    """A name, or a glob with `*`, `?` and `[...]`."""
    family: str | None = None
    device: str | None = None
    batch_size: int | None = None
    input_size: int | None = None
    metric: str | None = None
    """Only those that have it."""
    outcome: Outcome | str | None = None
    """Asks for attempts that ended so, instead of labels."""
    provenance: Provenance | str | None = None
    campaign: str | None = None

    def __post_init__(self) -> None:
        choices: dict[str, Sequence[str]] = {
            "metric": [*METRICS, "energy_j"],
            "outcome": list(Outcome),
            "provenance": list(Provenance),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise InputError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


_Query = Select[*tuple[Any, ...]]
_Columns = Mapping[str, InstrumentedAttribute[Any]]

_WORKLOAD: _Columns = {
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
_LABEL_COLUMNS: _Columns = {
    "id": LabelRow.id,
    **_WORKLOAD,
    "protocol": LabelRow.protocol_name,
    "step_time_ms": LabelRow.step_time_ms,
    "memory_mib": LabelRow.memory_mib,
    "power_w": LabelRow.power_w,
    "energy_j": LabelRow.energy_j,
    "provenance": LabelRow.provenance,
    "created_at": LabelRow.created_at,
}
_MEASUREMENT_COLUMNS: _Columns = {
    "id": MeasurementRow.id,
    **_WORKLOAD,
    "protocol": MeasurementRow.protocol_name,
    "outcome": MeasurementRow.outcome,
    "step_time_ms": MeasurementRow.step_median_ms,
    "memory_mib": MeasurementRow.memory_mib,
    "power_w": MeasurementRow.power_w,
    "energy_j": MeasurementRow.energy_j,
    "provenance": MeasurementRow.provenance,
    "started_at": MeasurementRow.started_at,
    "duration_s": MeasurementRow.duration_s,
    "failed_in": MeasurementRow.failed_in,
    "message": MeasurementRow.message,
}
_NUMBERS = (*METRICS, "energy_j")


class Labels(Database):
    """The part of the store that answers questions about labels and attempts."""

    def labels(self, wanted: LabelFilter | None = None) -> list[LabelRecord]:
        """The labels that pass the filter, in the order in which they were made.

        Raises:
            InputError: the filter names an outcome: those are attempts, for `query_labels`.
        """
        wanted = wanted or LabelFilter()
        if wanted.outcome is not None:
            raise InputError("labels have no outcome; ask query_labels for attempts")
        with self._reading() as session:
            query = _matching(session, _join_labels(select(*_WHOLE_LABEL)), wanted)
            return [_label(*row) for row in session.execute(query.order_by(LabelRow.id))]

    def campaign_labels(
        self, campaign_id: str, *, device: str | None = None, role: Role | str | None = None
    ) -> list[LabelRecord]:
        """The labels of a campaign's assignments, with their roles, as planned."""
        query = (
            _join_labels(select(*_WHOLE_LABEL, AssignmentRow.role))
            .join(AssignmentLabelRow, AssignmentLabelRow.label_id == LabelRow.id)
            .join(AssignmentRow, AssignmentRow.id == AssignmentLabelRow.assignment_id)
            .where(AssignmentRow.campaign_id == campaign_id)
            .order_by(*AS_PLANNED, AssignmentRow.device_key)
        )
        if device is not None:
            query = query.where(AssignmentRow.device_key == device)
        if role is not None:
            query = query.where(AssignmentRow.role == Role(role))
        with self._reading() as session:
            return [_label(*row) for row in session.execute(query)]

    def query_labels(
        self, wanted: LabelFilter, *, sort: str = "architecture", limit: int | None = None
    ) -> pd.DataFrame:
        """A table of the labels that pass the filter, or of attempts if it names an outcome.

        Args:
            wanted: the filter.
            sort: a column; with a leading `-` the largest first. Missing values come last.
            limit: rows at most.

        Raises:
            InputError: there is no such column.
        """
        columns = _LABEL_COLUMNS if wanted.outcome is None else _MEASUREMENT_COLUMNS
        name = sort.removeprefix("-")
        if name not in columns:
            raise InputError(f"cannot sort by {name!r}; there is {', '.join(columns)}")
        query: _Query = select(*(column.label(name) for name, column in columns.items()))
        join = _join_labels if wanted.outcome is None else _join_measurements
        by = columns[name].desc() if sort.startswith("-") else columns[name].asc()
        with self._reading() as session:
            query = _matching(session, join(query), wanted)
            query = query.order_by(by.nulls_last(), columns["id"]).limit(limit)
            return _frame(session.execute(query).all(), list(columns))

    def adopt_labels(
        self, campaign_id: str, device: str, fingerprint: str, protocol_name: str
    ) -> int:
        """Closes open assignments whose configuration was measured before, by any campaign.

        Only measured labels count, of the same device key, software stack and protocol.

        Returns:
            How many assignments need no measurement any more.
        """
        query = (
            select(AssignmentRow, LabelRow.id)
            .join(LabelRow, LabelRow.configuration_id == AssignmentRow.configuration_id)
            .join(DeviceRow, DeviceRow.id == LabelRow.device_id)
            .where(AssignmentRow.campaign_id == campaign_id)
            .where(AssignmentRow.device_key == device)
            .where(AssignmentRow.state == AssignmentState.OPEN)
            .where(DeviceRow.key == device)
            .where(DeviceRow.fingerprint == fingerprint)
            .where(LabelRow.protocol_name == protocol_name)
            .where(LabelRow.provenance == Provenance.MEASURED)
            .with_for_update(of=AssignmentRow)
        )
        with self._writing() as session:
            found = session.execute(query).all()
            for assignment, label_id in found:
                end_lease(assignment, AssignmentState.DONE)
                session.add(AssignmentLabelRow(assignment_id=assignment.id, label_id=label_id))
            return len(found)


_WHOLE_LABEL = (LabelRow, ConfigurationRow, DeviceRow.key, DeviceRow.fingerprint)


def _join_labels(query: _Query) -> _Query:
    return (
        query.select_from(LabelRow)
        .join(ConfigurationRow, ConfigurationRow.id == LabelRow.configuration_id)
        .join(DeviceRow, DeviceRow.id == LabelRow.device_id)
    )


def _join_measurements(query: _Query) -> _Query:
    return (
        query.select_from(MeasurementRow)
        .join(ConfigurationRow, ConfigurationRow.id == MeasurementRow.configuration_id)
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
    )


def _matching(session: Session, query: _Query, wanted: LabelFilter) -> _Query:
    """The query with the filter's conditions; values go in as parameters, never as text."""
    columns = _LABEL_COLUMNS if wanted.outcome is None else _MEASUREMENT_COLUMNS
    for name in ("family", "device", "batch_size", "input_size", "outcome", "provenance"):
        value = getattr(wanted, name)
        if value is not None:
            query = query.where(columns[name] == value)
    if wanted.architecture is not None:
        query = query.where(_architecture_matches(session, wanted.architecture))
    if wanted.metric is not None:
        query = query.where(columns[wanted.metric].is_not(None))
    if wanted.campaign is not None and wanted.outcome is not None:
        query = query.where(MeasurementRow.campaign_id == wanted.campaign)
    elif wanted.campaign is not None:
        query = query.where(
            LabelRow.id.in_(
                select(AssignmentLabelRow.label_id)
                .join(AssignmentRow, AssignmentRow.id == AssignmentLabelRow.assignment_id)
                .where(AssignmentRow.campaign_id == wanted.campaign)
            )
        )
    return query


def _architecture_matches(session: Session, pattern: str) -> ColumnElement[bool]:
    """A glob is matched here, against the architectures that there are.

    So it means the same as in a pool on every back end, and `%` or `_` mean themselves.
    """
    if not set(pattern) & set("*?["):
        return ConfigurationRow.architecture == pattern
    known = session.scalars(select(ConfigurationRow.architecture).distinct())
    return ConfigurationRow.architecture.in_([a for a in known if fnmatch.fnmatchcase(a, pattern)])


def _frame(rows: Sequence[Any], columns: list[str]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame.from_records([tuple(row) for row in rows], columns=columns)
    for name in {*_NUMBERS, "duration_s"} & set(columns):
        frame[name] = frame[name].astype("float64")
    for name in {"created_at", "started_at"} & set(columns):
        frame[name] = pd.to_datetime(frame[name], utc=True, format="ISO8601")
    for name in {"provenance", "outcome"} & set(columns):
        frame[name] = frame[name].map(str)
    return frame


def _label(
    row: LabelRow,
    configuration: ConfigurationRow,
    device: str,
    fingerprint: str,
    role: Role | None = None,
) -> LabelRecord:
    return LabelRecord(
        id=row.id,
        configuration=configuration_of(configuration),
        device=device,
        fingerprint=fingerprint,
        protocol=row.protocol_name,
        step_time_ms=row.step_time_ms,
        memory_mib=row.memory_mib,
        power_w=row.power_w,
        energy_j=row.energy_j,
        provenance=row.provenance,
        measurement_id=row.measurement_id,
        created_at=row.created_at,
        role=role,
    )
