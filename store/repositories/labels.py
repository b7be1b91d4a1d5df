"""Labels as records, and taking over those that an earlier campaign paid for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, select

from trappm.profiler.errors import InputError
from trappm.profiler.records import Configuration, Pair, Provenance
from trappm.store.db.engine import Database
from trappm.store.db.models import (
    ArchitectureGraphRow,
    AssignmentLabelRow,
    AssignmentRow,
    ConfigurationRow,
    DeviceRow,
    GraphRow,
    LabelRow,
)
from trappm.store.query.suggestions import refuse_unknown_names
from trappm.store.query.tables import LabelFilter, restricted
from trappm.store.records import AssignmentState, LabelRecord, Role
from trappm.store.repositories.assignments import (
    WHOLE_ASSIGNMENT,
    assignment_of,
    ended,
    write,
    write_labels,
)
from trappm.store.repositories.campaigns import AS_PLANNED
from trappm.store.repositories.workloads import configuration_of

_Query = Select[*tuple[Any, ...]]


class Labels(Database):
    """The part of the store that gives out labels as records."""

    def labels(self, wanted: LabelFilter | None = None) -> list[LabelRecord]:
        """The labels that pass the filter, in the order in which they were made.

        Raises:
            InputError: the filter names an outcome: those are attempts, for `query_labels`.
        """
        wanted = wanted or LabelFilter()
        if wanted.outcome is not None:
            raise InputError("labels have no outcome; ask query_labels for attempts")
        with self._reading() as session:
            query = restricted(session, _join_labels(select(*_WHOLE_LABEL)), wanted)
            return [_label(row) for row in session.execute(query.order_by(LabelRow.id))]

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
            return [_label(row) for row in session.execute(query)]

    def label(self, label_id: int) -> LabelRecord:
        """One label.

        Raises:
            InputError: there is none of this id.
        """
        with self._reading() as session:
            query = _join_labels(select(*_WHOLE_LABEL)).where(LabelRow.id == label_id)
            found = session.execute(query).one_or_none()
            if found is None:
                raise InputError(f"no label has the id {label_id}; see: trappm labels query")
            return _label(found)

    def labels_of(
        self, pairs: Iterable[Pair], what: Configuration, device: str
    ) -> list[LabelRecord]:
        """Labels of these architectures and input sizes on a device, under any stack and protocol.

        Args:
            pairs: of an architecture and an input size, which take the place of those of `what`.
            what: batch size, precision, memory format, optimizer and phase.
            device: its key.
        """
        wanted = set(pairs)
        query = (
            _join_labels(select(*_WHOLE_LABEL))
            .where(ConfigurationRow.architecture.in_(sorted({name for name, _ in wanted})))
            .where(DeviceRow.key == device)
            .where(*_same_settings(what))
            .order_by(LabelRow.id)
        )
        with self._reading() as session:
            found = [_label(row) for row in session.execute(query)]
        return [
            label for label in found
            if (label.configuration.architecture, label.configuration.input_size) in wanted
        ]  # fmt: skip

    def labelled_pairs(
        self, device: str | None = None, like: Configuration | None = None
    ) -> list[Pair]:
        """Architectures and input sizes with a label that is not simulated, each once.

        Args:
            device: its key; all devices without one.
            like: only labels of its batch size and settings.

        Raises:
            InputError: the store knows no such device; the nearest one is told.
        """
        row = ConfigurationRow
        query = _answering(select(row.architecture, row.input_size).distinct(), device)
        if like is not None:
            query = query.where(*_same_settings(like))
        with self._reading() as session:
            pairs = [(name, size) for name, size in session.execute(query)]
            if not pairs:
                refuse_unknown_names(session, LabelFilter(device=device))
        return sorted(pairs)

    def labelled_configurations(
        self, architectures: Iterable[str], device: str
    ) -> list[Configuration]:
        """What there is a label of that is not simulated, of these architectures on a device."""
        named = ConfigurationRow.architecture.in_(sorted(set(architectures)))
        query = _answering(select(ConfigurationRow).distinct(), device).where(named)
        with self._reading() as session:
            return sorted(configuration_of(row) for row in session.scalars(query))

    def pairs_of_graph(self, content_hash: str) -> list[Pair]:
        """The architectures and input sizes that have this graph."""
        row = ArchitectureGraphRow
        query = select(row.architecture, row.input_size).where(row.graph_hash == content_hash)
        with self._reading() as session:
            return [(name, size) for name, size in session.execute(query)]

    def pairs_of_same_graph(self, architecture: str, input_size: int) -> list[Pair]:
        """As `pairs_of_graph`, of the graph that this one has; empty if none is known."""
        with self._reading() as session:
            row = session.get(ArchitectureGraphRow, (architecture, input_size))
        return [] if row is None or row.graph_hash is None else self.pairs_of_graph(row.graph_hash)

    def graphs_of_size(self, node_count: int) -> dict[str, bytes]:
        """The templates of so many nodes, as `GraphTemplate.to_bytes` gives them, by their hash."""
        query = select(GraphRow.content_hash, GraphRow.template).filter_by(node_count=node_count)
        with self._reading() as session:
            return {row.content_hash: row.template for row in session.execute(query)}

    def adopt_labels(
        self, campaign_id: str, device: str, fingerprint: str, protocol_name: str
    ) -> int:
        """Closes open assignments whose configuration was measured before, by any campaign.

        Only measured labels count, of the same device key, software stack and protocol.

        Returns:
            How many assignments need no measurement any more.
        """
        query = (
            WHOLE_ASSIGNMENT.add_columns(LabelRow.id.label("label_id"))
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
            write(session, [ended(assignment_of(row), AssignmentState.DONE) for row in found])
            write_labels(session, [(row.id, row.label_id) for row in found])
            return len(found)


_WHOLE_LABEL = (
    *LabelRow.__table__.columns,
    *(c for c in ConfigurationRow.__table__.columns if c.name not in {"id", "family"}),
    DeviceRow.key,
    DeviceRow.fingerprint,
)
"""Columns rather than entities, which take twice the time to read."""


def _answering(query: _Query, device: str | None) -> _Query:
    """The query of configurations, of those that have a label which is not simulated."""
    query = (
        query.join(LabelRow, LabelRow.configuration_id == ConfigurationRow.id)
        .join(DeviceRow, DeviceRow.id == LabelRow.device_id)
        .where(LabelRow.provenance != Provenance.SIMULATED)
    )
    return query if device is None else query.where(DeviceRow.key == device)


def _same_settings(what: Configuration) -> list[ColumnElement[bool]]:
    names = ("batch_size", "precision", "memory_format", "optimizer", "phase")
    return [getattr(ConfigurationRow, name) == getattr(what, name) for name in names]


def _join_labels(query: _Query) -> _Query:
    return (
        query.select_from(LabelRow)
        .join(ConfigurationRow, ConfigurationRow.id == LabelRow.configuration_id)
        .join(DeviceRow, DeviceRow.id == LabelRow.device_id)
    )


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
