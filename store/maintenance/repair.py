"""Making labels again from the measurements, where `store check` finds contradictions.

A label follows from its measurements alone, by the rule of recording (`label_rows`). So a wrong one
is taken away, and all measurements of its place are offered again, in the order of their recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, delete, exists, func, not_, or_, select
from sqlalchemy.orm import Session

from trappm.store.db.models import (
    AssignmentLabelRow,
    AssignmentRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
)
from trappm.store.maintenance.contradictions import label_faults, without_label
from trappm.store.repositories.label_rows import label_upsert, label_values
from trappm.store.repositories.measurement_rows import measurement_of_row

_Place = tuple[str, int, str]
"""What there is one label for: configuration, device and protocol."""


@dataclass(frozen=True, kw_only=True)
class Relabelled:
    """What became of labels that were wrong or lost."""

    wrong: int
    made: int
    """Labels made again or for the first time; fewer than were wrong where nothing stands behind
    one."""


def relabel(session: Session) -> Relabelled:
    """Makes labels that are wrong or lost again from what was measured."""
    wrong = _wrong_labels(session)
    places = [*wrong, *_places_without_label(session)]
    links = _take_links(session, wrong)
    gone = delete(LabelRow).where(LabelRow.id == bindparam("gone"))
    if wrong:
        session.connection().execute(gone, [{"gone": label_id} for label_id in wrong.values()])
    measured_elsewhere = _places_without_label(session)  # of labels that stood misplaced
    made = sum(
        _make_label(session, place, wrong.get(place))
        for place in dict.fromkeys([*places, *measured_elsewhere])
    )
    _link_again(session, links)
    return Relabelled(wrong=len(wrong), made=made)


def _wrong_labels(session: Session) -> dict[_Place, int]:
    faults = [condition for _, _, condition, _ in label_faults(session.connection())]
    query = select(*_place_of(LabelRow), LabelRow.id).where(or_(*faults)).order_by(LabelRow.id)
    return {(what, device, protocol): id_ for what, device, protocol, id_ in session.execute(query)}


def _places_without_label(session: Session) -> list[_Place]:
    row = MeasurementRow
    query = select(*_place_of(row)).where(without_label(session.connection())).distinct()
    return [(what, device, protocol) for what, device, protocol in session.execute(query)]


def _place_of(row: type[LabelRow | MeasurementRow]) -> tuple[Any, Any, Any]:
    return row.configuration_id, row.device_id, row.protocol_name


def _make_label(session: Session, place: _Place, label_id: int | None) -> bool:
    """Offers what was measured at a place to its label, under this id; whether there is one now."""
    row = MeasurementRow
    query = (
        select(row, ConfigurationRow, DeviceRow.key)
        .join(ConfigurationRow, ConfigurationRow.id == row.configuration_id)
        .join(DeviceRow, DeviceRow.id == row.device_id)
        .where(*(column == value for column, value in zip(_place_of(row), place, strict=True)))
        .order_by(row.id)
    )
    names = ("configuration_id", "device_id", "protocol_name")
    known = dict(zip(names, place, strict=True)) | ({} if label_id is None else {"id": label_id})
    is_made = False
    for measured in session.execute(query).all():
        values = label_values(measurement_of_row(*measured))
        if values is not None:
            values |= {"measurement_id": measured[0].id}
            session.connection().execute(label_upsert(session), [known | values])
            is_made = True
    return is_made


def _take_links(session: Session, wrong: dict[_Place, int]) -> dict[str, int]:
    """Takes assignments' links to wrong labels, and to none, out of the database; these links."""
    link = AssignmentLabelRow
    no_label = not_(exists(select(1).where(LabelRow.id == link.label_id)))
    ids = set(wrong.values())
    taken = {
        assignment: label
        for assignment, label in session.execute(select(link.assignment_id, link.label_id))
        if label in ids
    } | dict(session.execute(select(link.assignment_id, link.label_id).where(no_label)).all())
    query = delete(link).where(link.assignment_id == bindparam("taken"))
    if taken:
        session.connection().execute(query, [{"taken": assignment_id} for assignment_id in taken])
    return taken


def _link_again(session: Session, links: dict[str, int]) -> None:
    """Links assignments to the label of the same id, or else to one of what they are of."""
    for assignment_id, label_id in links.items():
        of_same = (
            select(func.min(LabelRow.id))
            .join(DeviceRow, DeviceRow.id == LabelRow.device_id)
            .join(AssignmentRow, AssignmentRow.configuration_id == LabelRow.configuration_id)
            .where(AssignmentRow.id == assignment_id, AssignmentRow.device_key == DeviceRow.key)
        )
        same = session.scalar(select(LabelRow.id).where(LabelRow.id == label_id))
        label = session.scalar(of_same) if same is None else same
        if label is not None:
            session.add(AssignmentLabelRow(assignment_id=assignment_id, label_id=label))
