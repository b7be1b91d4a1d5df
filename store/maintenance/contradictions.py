"""Finds what no constraint excludes: rows that contradict each other, bytes unlike their hash.

Each check reads a table or two once. Those that must unpack bytes read them a few at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Row,
    Table,
    and_,
    exists,
    func,
    literal_column,
    not_,
    or_,
    select,
)
from sqlalchemy.orm import InstrumentedAttribute

from trappm.profiler.records import GraphTemplate, Outcome, Provenance
from trappm.profiler.simulation.step_profile import StepProfile
from trappm.store.db.engine import database_time
from trappm.store.db.models import (
    ArchitectureGraphRow,
    AssignmentLabelRow,
    AssignmentRow,
    CampaignRow,
    ConfigurationRow,
    DeviceRow,
    EventRow,
    GraphRow,
    LabelRow,
    MeasurementRow,
    PoolRow,
    RoundRow,
    StepProfileRow,
)
from trappm.store.maintenance.findings import BY_HAND, Finding, faulty_rows
from trappm.store.records import AssignmentState, CampaignState, Role, RoundState
from trappm.store.repositories.owners import SILENT_S
from trappm.store.repositories.workloads import configuration_of

_AT_ONCE = 500
_ROUNDING_MIB = 1.0
"""Capacities are written down in whole MiB."""

_LARGEST = sys.float_info.max
"""Beyond is infinite; PostgreSQL sorts NaN there too, SQLite has none."""

_LABEL_AGAIN = (
    "trust the measurements: trappm store backup FILE, then trappm store mend, which makes labels "
    "again from them"
)
_RESUME = "trappm campaign resume CAMPAIGN takes such leases back"
_MAKE_AGAIN = "delete the row after trappm store backup; trappm pool build makes it anew"


def contradictions(connection: Connection) -> Iterator[Finding]:
    """Findings in tables whose columns and constraints are as they should be."""
    for rows, what, condition, mend in (
        *label_faults(connection),
        *_measurements(connection),
        *_assignments(connection),
        *_labels_of_assignments(),
    ):
        yield from faulty_rows(connection, rows, condition, what=what, mend=mend)
    yield from _bytes(connection)


_Check = tuple[Table, str, ColumnElement[bool], str]


def label_faults(connection: Connection) -> Iterator[_Check]:
    """What is wrong with labels that have a measurement behind them."""
    label, made_by = LabelRow, MeasurementRow
    table = _table(label)

    def behind(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
        return exists(select(1).where(made_by.id == label.measurement_id, *conditions))

    place = ("configuration_id", "device_id", "protocol_name", "provenance")
    other_place = or_(*(getattr(label, name) != getattr(made_by, name) for name in place))
    yield (
        table,
        "labels of something else than their measurement",
        behind(other_place),
        _LABEL_AGAIN,
    )

    metrics = {
        label.step_time_ms: made_by.step_median_ms,
        label.memory_mib: made_by.memory_mib,
        label.power_w: made_by.power_w,
        label.energy_j: made_by.energy_j,
    }
    differs = or_(
        *(ours.is_distinct_from(measured) for ours, measured in metrics.items()),
    )
    what = "labels whose values differ from their measurement"
    yield table, what, behind(made_by.outcome == Outcome.OK, differs), _LABEL_AGAIN

    capacity = _number(connection, made_by.memory_detail_mib, "capacity")
    not_censored = or_(
        *(ours.is_not(None) for ours in metrics),
        label.memory_above_mib.is_distinct_from(capacity),
    )
    what = "censored labels that say something else than that memory ran out"
    yield table, what, behind(made_by.outcome == Outcome.OOM, not_censored), _LABEL_AGAIN

    yield (
        table,
        "labels although a measurement is worth more",
        _worth_more(connection),
        _LABEL_AGAIN,
    )


def _worth_more(connection: Connection) -> ColumnElement[bool]:
    """Of labels: recording would replace them (`store.repositories.label_rows.label_upsert`)."""
    label, made_by = LabelRow, MeasurementRow
    same_place = (
        made_by.configuration_id == label.configuration_id,
        made_by.device_id == label.device_id,
        made_by.protocol_name == label.protocol_name,
    )
    measured_instead = and_(
        label.provenance != Provenance.MEASURED,
        made_by.provenance == Provenance.MEASURED,
        _makes_label(connection),
    )
    value_for_bound = and_(
        label.memory_above_mib.is_not(None),
        made_by.provenance == label.provenance,
        made_by.outcome == Outcome.OK,
    )
    return exists(select(1).where(*same_place, or_(measured_instead, value_for_bound)))


def without_label(connection: Connection) -> ColumnElement[bool]:
    """Of measurements: they make a label, and there is none."""
    row, label = MeasurementRow, LabelRow
    labelled = exists(
        select(1).where(
            label.configuration_id == row.configuration_id,
            label.device_id == row.device_id,
            label.protocol_name == row.protocol_name,
        )
    )
    return and_(_makes_label(connection), not_(labelled))


def _makes_label(connection: Connection) -> ColumnElement[bool]:
    """Of measurements: those that `store.repositories.label_rows.label_values` makes a label of."""
    row = MeasurementRow
    capacity = _number(connection, row.memory_detail_mib, "capacity")
    return or_(row.outcome == Outcome.OK, and_(row.outcome == Outcome.OOM, capacity > 0))


def _measurements(connection: Connection) -> Iterator[_Check]:
    row = MeasurementRow
    table = _table(row)
    what = "measurements without the label that they make"
    yield table, what, without_label(connection), _LABEL_AGAIN

    named = (
        _number(connection, row.environment, "device_memory_mib"),
        _number(connection, row.environment, "host_memory_mib"),
        _number(connection, row.memory_detail_mib, "capacity"),
    )
    beyond = row.memory_mib > func.coalesce(*named) + _ROUNDING_MIB
    yield table, "measurements of more memory than there is", beyond, BY_HAND

    numbers = [column for column in table.columns if isinstance(column.type, Float)]
    infinite = or_(*(func.abs(column) > _LARGEST for column in numbers))
    yield table, "measurements with a number that is not finite", infinite, BY_HAND

    shares = (row.step_forward_share, row.step_backward_share, row.step_optimizer_share)
    odd = or_(
        row.step_p95_ms < row.step_median_ms, *(not_(share.between(0, 1)) for share in shares)
    )
    yield table, "measurements whose summary of the step cannot be", odd, BY_HAND

    assignment = AssignmentRow
    other = or_(
        assignment.configuration_id != row.configuration_id,
        assignment.campaign_id.is_distinct_from(row.campaign_id),
        not_(
            exists(
                select(1).where(
                    DeviceRow.id == row.device_id, DeviceRow.key == assignment.device_key
                )
            )
        ),
    )
    of_other = exists(select(1).where(assignment.id == row.assignment_id, other))
    yield table, "measurements of something else than their assignment", of_other, BY_HAND


def _assignments(connection: Connection) -> Iterator[_Check]:
    row = AssignmentRow
    table = _table(row)
    leased = row.state == AssignmentState.LEASED
    since = (database_time(connection) - timedelta(seconds=SILENT_S)).isoformat()
    alive = exists(
        select(1).where(CampaignRow.id == row.campaign_id, CampaignRow.owner_seen_at > since)
    )
    dead = and_(leased, not_(alive))
    yield table, "leases of campaigns that nobody runs", dead, _RESUME

    ended = [CampaignState.FINISHED, CampaignState.CANCELLED]
    over = exists(select(1).where(CampaignRow.id == row.campaign_id, CampaignRow.state.in_(ended)))
    yield table, "leases in campaigns that have ended", and_(leased, over), BY_HAND

    closed = exists(
        select(1).where(
            RoundRow.campaign_id == row.campaign_id,
            RoundRow.number == row.round_number,
            RoundRow.state == RoundState.CLOSED,
        )
    )
    # What a stop rule left unmeasured stays open in its rounds.
    enough = exists(
        select(1).where(EventRow.campaign_id == row.campaign_id, EventRow.kind == "enough")
    )
    is_over = and_(row.state == AssignmentState.OPEN, enough)
    to_do = and_(row.state.in_([AssignmentState.OPEN, AssignmentState.LEASED]), not_(is_over))
    yield (
        table,
        "assignments still to do in rounds that are closed",
        and_(to_do, closed),
        BY_HAND,
    )


def _labels_of_assignments() -> Iterator[_Check]:
    row = AssignmentRow
    table = _table(row)
    linked = exists(select(1).where(AssignmentLabelRow.assignment_id == row.id))
    attempted = exists(select(1).where(MeasurementRow.assignment_id == row.id))
    done = row.state == AssignmentState.DONE
    yield table, "assignments with a label that are not done", and_(not_(done), linked), BY_HAND
    what = "assignments done without a label or an attempt"
    yield table, what, and_(done, not_(linked), not_(attempted)), BY_HAND

    other = exists(
        select(1).where(
            AssignmentLabelRow.assignment_id == row.id,
            LabelRow.id == AssignmentLabelRow.label_id,
            DeviceRow.id == LabelRow.device_id,
            or_(LabelRow.configuration_id != row.configuration_id, DeviceRow.key != row.device_key),
        )
    )
    yield table, "assignments with the label of something else", other, BY_HAND

    held_out = exists(
        select(1).where(
            PoolRow.campaign_id == row.campaign_id,
            PoolRow.configuration_id == row.configuration_id,
            PoolRow.held_out,
        )
    )
    what = "assignments to train on what is held out for evaluation"
    mend = "errors of this campaign's report are too small: launch it again with another seed"
    yield table, what, and_(row.role == Role.TRAIN, held_out), mend


def _bytes(connection: Connection) -> Iterator[Finding]:
    """Rows whose bytes or values do not give what they are stored under."""
    graph, step, what = GraphRow, StepProfileRow, ConfigurationRow
    yield from _unlike(
        connection,
        _table(graph),
        "graphs whose bytes do not give their hash",
        _is_its_hash,
        f"{_MAKE_AGAIN}; delete its rows of architecture_graphs too",
    )
    yield from _unlike(
        connection,
        _table(step),
        "step profiles whose bytes do not give their figures",
        _is_its_profile,
        _MAKE_AGAIN,
        step.profile.is_not(None),
    )
    yield from _unlike(
        connection,
        _table(what),
        "configurations whose id is not their own",
        lambda row: configuration_of(row).id == row.id,
        BY_HAND,
    )
    samples = MeasurementRow.step_samples_ms
    yield from _unlike(
        connection,
        _table(MeasurementRow),
        "measurements with raw samples that cannot be",
        _has_possible_samples,
        BY_HAND,
        func.length(samples) > 0,
        columns=(samples,),
    )
    has_both = exists(
        select(1).where(
            ArchitectureGraphRow.architecture == step.architecture,
            ArchitectureGraphRow.input_size == step.input_size,
            ArchitectureGraphRow.graph_hash.is_not(None),
        )
    )
    yield from faulty_rows(
        connection,
        _table(step),
        not_(has_both),
        what="step profiles of architectures without a graph",
        mend=_MAKE_AGAIN,
    )


def _unlike(
    connection: Connection,
    table: Table,
    what: str,
    is_right: Callable[[Row[tuple[object, ...]]], bool],
    mend: str,
    *where: ColumnElement[bool],
    columns: tuple[InstrumentedAttribute[bytes], ...] = (),
) -> Iterator[Finding]:
    """A finding if there are rows for which this does not hold, or cannot even be computed."""
    key = list(table.primary_key.columns)
    query = select(*key, *columns) if columns else select(table)
    rows = connection.execute(
        query.where(*where).order_by(*key).execution_options(yield_per=_AT_ONCE)
    )
    count, example = 0, ""
    for row in rows:
        try:
            if is_right(row):
                continue
        except Exception:  # noqa: S110 - whatever NumPy raises for bytes that are none of ours
            pass
        count += 1
        example = example or ", ".join(str(getattr(row, column.name)) for column in key)
    if count:
        yield Finding(what=what, count=count, example=example, mend=mend)


def _is_its_hash(row: Row[tuple[object, ...]]) -> bool:
    graph = GraphTemplate.from_bytes(row.template)
    return (graph.content_hash, len(graph.operators)) == (row.content_hash, row.node_count)


def _is_its_profile(row: Row[tuple[object, ...]]) -> bool:
    profile = StepProfile.from_bytes(row.profile)
    return (
        profile.saved_bytes.constant,
        profile.saved_bytes.slope,
        profile.trainable_parameters,
        profile.frozen_parameters,
    ) == (
        row.saved_bytes_constant,
        row.saved_bytes_per_sample,
        row.trainable_parameters,
        row.frozen_parameters,
    )


def _has_possible_samples(row: Row[tuple[object, ...]]) -> bool:
    samples = np.frombuffer(row.step_samples_ms, dtype="<f4")
    return bool(np.isfinite(samples).all() and (samples > 0).all())


def _number(
    connection: Connection, document: InstrumentedAttribute[dict[str, object]], key: str
) -> ColumnElement[float]:
    """A number in a JSON document; NULL where there is none of this name, or something else."""
    value = f"{document.class_.__tablename__}.{document.key}"
    if connection.dialect.name == "sqlite":
        kind, number = f"json_type({value}, '$.{key}')", f"json_extract({value}, '$.{key}')"
        is_number = f"{kind} IN ('integer', 'real')"
    else:
        number = f"({value} ->> '{key}')::float8"
        is_number = f"jsonb_typeof({value} -> '{key}') = 'number'"
    return literal_column(f"CASE WHEN {is_number} THEN {number} END", Float())


def _table(model: type) -> Table:
    table: Table = model.__table__  # type: ignore[attr-defined]
    return table
