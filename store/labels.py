"""Labels as records, and taking over those that an earlier campaign paid for."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, select

from profiler.errors import InputError
from profiler.records import Provenance
from store.asking import LabelFilter, restricted
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
)
from store.workloads import configuration_of

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
