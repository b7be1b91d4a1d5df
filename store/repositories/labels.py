"""Labels: as records, as tables, and as statistics of groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Row, func, select
from sqlalchemy.orm import Session

from trappm.profiler.errors import InputError
from trappm.profiler.records import Configuration, Pair, Provenance
from trappm.profiler.records.step_scope import IN_TRAINING
from trappm.store.db.models import (
    AssignmentLabelRow,
    AssignmentRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
)
from trappm.store.db.transactions import Repository, reading
from trappm.store.query.filters import (
    ATTEMPT_COLUMNS,
    LabelFilter,
    Query,
    columns_of,
    joined,
    matching,
    refuse_unknown_names,
    restricted,
)
from trappm.store.query.known_names import known_names
from trappm.store.query.tables import (
    check_columns,
    check_statistics,
    frame_of,
    summary,
    summary_columns,
)
from trappm.store.records import LabelRecord
from trappm.store.repositories.assignment_rows import AS_PLANNED
from trappm.store.repositories.workloads import configuration_of

if TYPE_CHECKING:
    import pandas as pd


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

    def summarize(
        self,
        wanted: LabelFilter,
        *,
        by: Sequence[str] = (),
        statistics: Sequence[str] = ("count", "mean"),
        columns: Sequence[str] | None = None,
        sort: str | None = None,
        limit: int | None = None,
    ) -> pd.DataFrame:
        """Statistics of labels (or attempts), by group.

        Args:
            wanted: the filter.
            by: columns whose values make a group; everything is one group without any.
            statistics: count (of values that are there), mean, std, min, median, max, and
                percentiles p1 to p99, which lie linearly between the two nearest values.
            columns: of what: metrics, and duration_s of attempts; the three metrics by default.
            sort: a column of the result; by the groups by default.
            limit: groups at most.

        Returns:
            A row for each group: its values, then `step_time_ms_mean` and so on. In
            `attrs["censored"]`: how many labels passed that have a bound and no value of memory.

        Raises:
            InputError: there is no such column or statistic; or as `query`.
        """
        check_statistics(wanted, by, statistics, columns, sort)
        rows = self.query(wanted, columns=summary_columns(wanted, by, columns), sort="id")
        return summary(
            rows, wanted, by=by, statistics=statistics, columns=columns, sort=sort, limit=limit
        )

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
