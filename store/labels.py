"""Labels and attempts: filters, records and tables.

Values enter SQL as parameters, never as text, and columns are looked up by name here.
"""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Float, Select, String, cast, func, literal, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from trappm.profiler.errors import InputError, nearest
from trappm.profiler.records import (
    METRICS,
    Configuration,
    Pair,
)
from trappm.profiler.records.step_scope import IN_TRAINING
from trappm.store.assignments import AS_PLANNED
from trappm.store.label_filter import (
    ANY_OUTCOME,
    Comparison,
    LabelFilter,
    comparisons,
    point_in_time,
)
from trappm.store.records import LabelRecord, configuration_of, record_of
from trappm.store.schema import (
    AssignmentLabelRow,
    AssignmentRow,
    Base,
    CampaignRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
)
from trappm.store.transactions import Repository, reading

if TYPE_CHECKING:
    import pandas as pd


def list_names(session: Session, column: InstrumentedAttribute[str]) -> list[str]:
    """Return the distinct values of a column, sorted."""
    return list(session.scalars(select(column).distinct().order_by(column)))


def architectures_matching(session: Session, pattern: str) -> list[str]:
    """Return the architectures of this name or glob.

    A glob is matched here, so that it means the same as in a pool on every back end.
    """
    if not is_glob(pattern):
        return [pattern]
    return fnmatch.filter(list_names(session, ConfigurationRow.architecture), pattern)


def is_glob(pattern: str) -> bool:
    return bool(set(pattern) & set("*?["))


Query = Select[*tuple[Any, ...]]
Columns = Mapping[str, InstrumentedAttribute[Any]]


def _columns(row: type[Base], *names: str) -> Columns:
    return {name: getattr(row, name) for name in names}


_WORKLOAD: Columns = {
    **_columns(
        ConfigurationRow, "architecture", "family", "batch_size", "input_size", "precision",
        "memory_format", "optimizer", "phase", "execution",
    ),
    "device": DeviceRow.key,
    "fingerprint": DeviceRow.fingerprint,
}  # fmt: skip
LABEL_COLUMNS: Columns = {
    "id": LabelRow.id,
    **_WORKLOAD,
    "protocol": LabelRow.protocol_name,
    **_columns(
        LabelRow, "step_time_ms", "memory_mib", "memory_above_mib", "power_w", "energy_j",
        "provenance", "created_at",
    ),
}  # fmt: skip
ATTEMPT_COLUMNS: Columns = {
    "id": MeasurementRow.id,
    **_WORKLOAD,
    "protocol": MeasurementRow.protocol_name,
    "outcome": MeasurementRow.outcome,
    "step_time_ms": MeasurementRow.step_median_ms,
    **_columns(MeasurementRow, "memory_mib", "power_w", "energy_j", "provenance"),
    "campaign": MeasurementRow.campaign_id,
    **_columns(MeasurementRow, "started_at", "duration_s", "failed_in", "message"),
}

_EQUAL = (
    "family", "device", "batch_size", "input_size", "precision", "memory_format", "optimizer",
    "phase", "execution", "protocol", "provenance",
)  # fmt: skip
"""Filters that restrict the column of their name to one value."""


def columns_of(wanted: LabelFilter) -> Columns:
    """Return the columns of labels, or of attempts if the filter names an outcome, by name."""
    return LABEL_COLUMNS if wanted.outcome is None else ATTEMPT_COLUMNS


def select_labels(session: Session, wanted: LabelFilter, what: Sequence[Any]) -> Query:
    """Return a query of these columns of the labels or attempts that pass the filter."""
    row = LabelRow if wanted.outcome is None else MeasurementRow
    return apply_filter(session, join_labels(row, what), wanted)


def join_labels(row: type[LabelRow | MeasurementRow], what: Sequence[Any]) -> Query:
    """Return a query of labels or attempts, joined with their configurations and devices."""
    return (
        select(*what)
        .select_from(row)
        .join(ConfigurationRow, ConfigurationRow.id == row.configuration_id)
        .join(DeviceRow, DeviceRow.id == row.device_id)
    )


def apply_filter(session: Session, query: Query, wanted: LabelFilter) -> Query:
    """Return the query of `join_labels` with the conditions of a filter."""
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
    for comparison in [] if wanted.where is None else comparisons(wanted.where):
        query = query.where(_condition(columns, comparison))
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


def _condition(columns: Columns, comparison: Comparison) -> ColumnElement[bool]:
    """Return the condition of a comparison.

    Raises:
        InputError: The column is unknown, or cannot be compared so with this value.
    """
    name, sign, text = comparison
    _check_names("compare", [name], columns)
    compare, column = _OPERATORS[sign], columns[name]
    if name in _TIMES:
        begin, end = point_in_time(text), point_in_time(text, end_of_day=True)
        if sign in _EQUALITIES:  # a date is the whole day
            is_within = column.between(begin, end)
            return ~is_within if sign == "!=" else is_within
        return compare(column, end if sign in {"<=", ">"} else begin)
    if name in (*NUMBERS, *_INTEGERS):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"cannot compare {name} with {text!r}; give a number, such as 100")
        # A number of its own type: PostgreSQL would round it to that of the column.
        return compare(column, literal(number, Float))
    if sign not in _EQUALITIES:
        raise InputError(f"cannot compare {name} by {sign}, because it is text; use = or !=")
    # As text, because an enumeration refuses unknown values.
    return compare(cast(column, String), text)


def refuse_unknown_names(session: Session, wanted: LabelFilter) -> None:
    """Refuse a filter with a name that the store does not have.

    Raises:
        InputError: The first such name, with the nearest known one.
    """
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
        known = list_names(session, column)
        matches = [name] if name in known else []
        if what == "campaign":  # an id, or its beginning
            matches = [campaign_id for campaign_id in known if campaign_id.startswith(name)]
        if len(matches) > 1:
            raise InputError(f"campaign {name!r} may be {' or '.join(matches[:10])}; name one")
        if not matches:
            raise _unknown_name(what, name, known)
    comparable = columns.keys() & columns_of(wanted).keys()
    for what, _, name in comparisons(wanted.where) if wanted.where is not None else ():
        if what in comparable and name not in (known := list_names(session, columns[what])):
            raise _unknown_name(what, name, known)


def _unknown_name(what: str, name: str, known: Sequence[str]) -> InputError:
    return InputError(f"the label store knows no {what} {name!r}; {nearest(name, known)}")


NUMBERS = (*METRICS, "memory_above_mib", "energy_j", "duration_s")
_INTEGERS = ("id", "batch_size", "input_size")
_TIMES = ("created_at", "started_at")
_EQUALITIES = ("=", "==", "!=")
_OPERATORS: Mapping[str, Callable[[Any, Any], ColumnElement[bool]]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def _check_names(doing: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise InputError(f"cannot {doing} {name!r}; there is {', '.join(known)}")


def frame_of(rows: Sequence[Any], columns: list[str]) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame.from_records([tuple(row) for row in rows], columns=columns)
    for name in columns:
        if name in NUMBERS:
            frame[name] = frame[name].astype("float64")
        elif name in _TIMES:
            frame[name] = pd.to_datetime(frame[name], utc=True, format="ISO8601")
        elif name in {"provenance", "outcome"}:
            frame[name] = frame[name].map(str)
    return frame


class Labels(Repository):
    """Labels, as records for heads and as tables for people."""

    @reading
    def find(self, session: Session, wanted: LabelFilter | None = None) -> list[LabelRecord]:
        """Return the labels that pass the filter, in the order in which they were made.

        Raises:
            InputError: The filter names an outcome, which selects attempts; see `query`.
        """
        wanted = wanted or LabelFilter()
        if wanted.outcome is not None:
            raise InputError(
                "labels have no outcome; attempts have, and come from: store.labels.query"
            )
        return _records(session, select_labels(session, wanted, _RECORD).order_by(LabelRow.id))

    @reading
    def of_campaign(self, session: Session, campaign_id: str) -> list[LabelRecord]:
        """Return the labels of a campaign's assignments with their roles, as planned."""
        query = (
            join_labels(LabelRow, [*_RECORD, AssignmentRow.role])
            .join(AssignmentLabelRow, AssignmentLabelRow.label_id == LabelRow.id)
            .join(AssignmentRow, AssignmentRow.id == AssignmentLabelRow.assignment_id)
            .where(AssignmentRow.campaign_id == campaign_id)
        )
        return _records(session, query.order_by(*AS_PLANNED))

    @reading
    def step_time_errors(self, session: Session, campaign_id: str) -> dict[int, float]:
        """Return the relative standard error of the step time by label, where it is known."""
        error = MeasurementRow.environment["step_time_relative_error"].as_float().label("error")
        query = (
            select(LabelRow.id, error)
            .join(AssignmentLabelRow, AssignmentLabelRow.label_id == LabelRow.id)
            .join(AssignmentRow, AssignmentRow.id == AssignmentLabelRow.assignment_id)
            .join(MeasurementRow, MeasurementRow.id == LabelRow.measurement_id)
            .where(AssignmentRow.campaign_id == campaign_id, error.is_not(None))
        )
        return {row.id: row.error for row in session.execute(query)}

    @reading
    def get(self, session: Session, label_id: int) -> LabelRecord:
        """Return the label with this id.

        Raises:
            InputError: There is none.
        """
        labels = _records(session, join_labels(LabelRow, _RECORD).where(LabelRow.id == label_id))
        if not labels:
            raise InputError(f"no label has the id {label_id}; see: trappm labels query")
        return labels[0]

    @reading
    def of_pairs(
        self, session: Session, pairs: Collection[Pair], what: Configuration, device: str
    ) -> list[LabelRecord]:
        """Return the labels of architectures and input sizes on a device, of all its stacks.

        They have the batch size and settings of `what`. Labels of steps that a callback recorded
        in a training are left out.
        """
        wanted = set(pairs)
        same = ("batch_size", "precision", "memory_format", "optimizer", "phase", "execution")
        query = join_labels(LabelRow, _RECORD).where(
            ConfigurationRow.architecture.in_(sorted({name for name, _ in wanted})),
            DeviceRow.key == device,
            LabelRow.protocol_name != IN_TRAINING,
            *(getattr(ConfigurationRow, name) == getattr(what, name) for name in same),
        )
        return [
            label for label in _records(session, query.order_by(LabelRow.id))
            if (label.configuration.architecture, label.configuration.input_size) in wanted
        ]  # fmt: skip

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
        """Return a table of the labels that pass the filter, or attempts if it names an outcome.

        Args:
            columns: Names of columns in their order; all by default.
            sort: Name of a column, with a leading `-` in descending order. Missing values are last.
            limit: Maximum number of rows, after `offset` rows that are skipped.

        Raises:
            InputError: A column is unknown; or no label passes, and a name in the filter is not in
                the store.
        """
        known = columns_of(wanted)
        chosen = list(columns or known)
        _check_names("sort by", [sort.removeprefix("-")], known)
        _check_names("show", chosen, known)
        by = known[sort.removeprefix("-")]
        order = by.desc() if sort.startswith("-") else by.asc()
        if by.property.columns[0].nullable:  # else an index could not serve
            order = order.nulls_last()
        query = select_labels(session, wanted, [known[name].label(name) for name in chosen])
        query = query.order_by(order, known["id"]).limit(limit).offset(offset or None)
        rows = session.execute(query).all()
        if not rows:
            refuse_unknown_names(session, wanted)
        return frame_of(rows, chosen)

    @reading
    def count(self, session: Session, wanted: LabelFilter, *, at_most: int) -> int:
        """Return the number of labels or attempts that pass the filter, at most `at_most`."""
        rows = select_labels(session, wanted, [columns_of(wanted)["id"]]).limit(at_most)
        return session.scalar(select(func.count()).select_from(rows.subquery())) or 0

    @reading
    def names(self, session: Session) -> dict[str, list[str]]:
        """Return the names that filters can use, by the field of `LabelFilter`, sorted."""
        columns = {
            "device": DeviceRow.key,
            "family": ConfigurationRow.family,
            "architecture": ConfigurationRow.architecture,
        }
        return {name: list_names(session, column) for name, column in columns.items()}

    @reading
    def attempts(self, session: Session, label_id: int) -> pd.DataFrame:
        """Return all attempts at a label's configuration on its device, the earliest first."""
        row, chosen = MeasurementRow, list(ATTEMPT_COLUMNS)
        query = (
            join_labels(row, [ATTEMPT_COLUMNS[name].label(name) for name in chosen])
            .join(
                LabelRow,
                (LabelRow.configuration_id == row.configuration_id)
                & (LabelRow.device_id == row.device_id),
            )
            .where(LabelRow.id == label_id)
            .order_by(row.started_at, row.id)
        )
        return frame_of(session.execute(query).all(), chosen)


_RECORD = [
    column.label(name)
    for name, column in {**LABEL_COLUMNS, "measurement_id": LabelRow.measurement_id}.items()
]


def _records(session: Session, query: Query) -> list[LabelRecord]:
    """Return the labels of a query of `_RECORD`, and a role if it has one."""
    return [
        record_of(
            LabelRecord, row, configuration=configuration_of(row), role=getattr(row, "role", None)
        )
        for row in session.execute(query)
    ]
