"""The label that a measurement makes, and which of two for one place stays.

A configuration that ran out of memory makes a label too, a censored one: its memory is missing, and
what it needs at least, the device's capacity, stands in `memory_above_mib`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from sqlalchemy import and_, or_
from sqlalchemy.orm import Session

from trappm.profiler.records import Measurement, Outcome, Provenance
from trappm.store.db.engine import Insert, back_end, insert, utc_now
from trappm.store.db.models import LabelRow


def label_place(measurement: Measurement, device_id: int) -> dict[str, Any]:
    """The columns that identify a label: each combination has one label."""
    return {
        "configuration_id": measurement.configuration.id,
        "device_id": device_id,
        "protocol_name": measurement.protocol.name,
    }


def label_values(measurement: Measurement) -> dict[str, Any] | None:
    """The columns of the label that this measurement makes; None if it makes none."""
    bound = None
    if measurement.outcome is Outcome.OOM:
        bound = measurement.memory_detail_mib.get("capacity")
    if measurement.outcome is not Outcome.OK and not (bound and 0 < bound < math.inf):
        return None
    ok = measurement.outcome is Outcome.OK
    return {
        "outcome": measurement.outcome,
        "provenance": measurement.provenance,
        "step_time_ms": measurement.step_time_ms if ok else None,
        "memory_mib": measurement.memory_mib if ok else None,
        "memory_above_mib": bound,
        "power_w": measurement.power_w if ok else None,
        "energy_j": measurement.energy_j if ok else None,
        "created_at": utc_now(),
    }


def makes_label(measurement: Measurement) -> bool:
    """Whether its configuration has a label once it is recorded."""
    return label_values(measurement) is not None


def label_upsert(session: Session) -> Insert:
    """Makes a label, or replaces the one that is there if the new one is worth more."""
    return _label_upsert(back_end(session))


@cache
def _label_upsert(name: str) -> Insert:
    query = insert(name, LabelRow)
    offered = query.excluded
    measured_instead = and_(
        offered.provenance == Provenance.MEASURED, LabelRow.provenance != Provenance.MEASURED
    )
    value_for_bound = and_(
        offered.provenance == LabelRow.provenance,
        offered.memory_above_mib.is_(None),
        LabelRow.memory_above_mib.is_not(None),
    )
    place = ("configuration_id", "device_id", "protocol_name")
    return query.on_conflict_do_update(
        index_elements=place,
        set_={c.name: c for c in offered if c.name not in {"id", *place}},
        where=or_(measured_instead, value_for_bound),
    )
