"""Asking for labels and attempts: which there are, in which columns, and what they amount to.

Values go into SQL as parameters, never as text, and names of columns are looked up here. Statistics
are computed from the rows by one code, so that they are the same on every back end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from trappm.profiler.errors import InputError
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
from trappm.store.db.engine import Database
from trappm.store.db.models import (
    AssignmentLabelRow,
    AssignmentRow,
    ConfigurationRow,
    DeviceRow,
    LabelRow,
    MeasurementRow,
)
from trappm.store.query.dates import point_in_time
from trappm.store.query.suggestions import architectures_matching, known_names, refuse_unknown_names

if TYPE_CHECKING:
    import pandas as pd

ANY_OUTCOME = "any"
"""As an outcome in a filter: all attempts, however they ended."""


@dataclass(frozen=True, kw_only=True)
class LabelFilter:
    """Which labels are asked for; what is None does not restrict.

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
    """Asks for attempts that ended so (or `any`), instead of labels."""
    provenance: Provenance | str | None = None
    campaign: str | None = None
    since: str | None = None
    """When the label was made, or the attempt begun: from this time on. As `until`, an ISO 8601
    date or time (UTC unless it says otherwise), or an age such as `7d` (m, h, d, w)."""
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
            if size is not None and not 1 <= size <= MAX_SIZE:
                raise InputError(f"{name} is {size}; it must be from 1 to {MAX_SIZE:,}")
        for text in (self.since, self.until):
            if text is not None:
                point_in_time(text)


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
    "memory_above_mib": LabelRow.memory_above_mib,
    "power_w": LabelRow.power_w,
    "energy_j": LabelRow.energy_j,
    "provenance": LabelRow.provenance,
    "created_at": LabelRow.created_at,
}
_ATTEMPT_COLUMNS: _Columns = {
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
_NUMBERS = (*METRICS, "memory_above_mib", "energy_j", "duration_s")
_TIMES = ("created_at", "started_at")
_NO_GROUPS = {"id", "message", *_NUMBERS, *_TIMES}
_EQUAL = (
    "family", "device", "batch_size", "input_size", "precision", "memory_format", "optimizer",
    "phase", "protocol", "provenance",
)  # fmt: skip
"""Filters that restrict the column of their name to one value."""

_STATISTICS = ("count", "mean", "std", "min", "median", "max")
_PERCENTILE = re.compile(r"p([1-9][0-9]?)")


class Asking(Database):
    """The part of the store that answers with tables."""

    def query_labels(
        self,
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
            offset: so many rows are left out at the beginning.

        Raises:
            InputError: there is no such column; or no label passes, and one of the names that the
                filter asks for is not in the store.
        """
        check_columns(wanted, columns, sort)
        known = _columns_of(wanted)
        chosen = list(columns or known)
        by = known[sort.removeprefix("-")]
        order = by.desc() if sort.startswith("-") else by.asc()
        if by.property.columns[0].nullable:  # else an index could not serve
            order = order.nulls_last()
        with self._reading() as session:
            query = _matching(session, wanted, [known[name].label(name) for name in chosen])
            query = query.order_by(order, known["id"]).limit(limit).offset(offset or None)
            rows = session.execute(query).all()
            if not rows:
                refuse_unknown_names(session, wanted)
        return _frame(rows, chosen)

    def count_labels(self, wanted: LabelFilter, *, at_most: int) -> int:
        """How many labels (or attempts) pass the filter; counting ends at `at_most`."""
        with self._reading() as session:
            rows = _matching(session, wanted, [_columns_of(wanted)["id"]]).limit(at_most)
            return session.scalar(select(func.count()).select_from(rows.subquery())) or 0

    def label_names(self) -> dict[str, list[str]]:
        """The names that filters can ask for, by the field of `LabelFilter`, sorted."""
        columns = {
            "device": DeviceRow.key,
            "family": ConfigurationRow.family,
            "architecture": ConfigurationRow.architecture,
        }
        with self._reading() as session:
            return {name: known_names(session, column) for name, column in columns.items()}

    def label_attempts(self, label_id: int) -> pd.DataFrame:
        """Every attempt at a label's configuration on its device and stack, the earliest first."""
        chosen = list(_ATTEMPT_COLUMNS)
        with self._reading() as session:
            query = _joined(MeasurementRow, [_ATTEMPT_COLUMNS[name].label(name) for name in chosen])
            label = select(LabelRow.configuration_id, LabelRow.device_id).where(
                LabelRow.id == label_id
            )
            place = session.execute(label).one_or_none()
            if place is None:
                return _frame([], chosen)
            query = query.where(
                MeasurementRow.configuration_id == place.configuration_id,
                MeasurementRow.device_id == place.device_id,
            )
            rows = session.execute(query.order_by(MeasurementRow.started_at, MeasurementRow.id))
            return _frame(rows.all(), chosen)

    def summarize_labels(
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
            InputError: there is no such column or statistic; or as `query_labels`.
        """
        check_statistics(wanted, by, statistics, columns, sort)
        metrics = list(columns or METRICS)
        bound = [name for name in ("memory_above_mib",) if name in _columns_of(wanted)]
        needed = dict.fromkeys([*by, *metrics, *bound])
        rows = self.query_labels(wanted, columns=list(needed), sort="id")
        groups = rows.groupby(list(by), dropna=False) if by else rows.groupby(lambda _: 0)
        result = groups[metrics].size().to_frame()[[]]
        for metric in metrics:
            for statistic in statistics:
                values = groups[metric]
                found = _PERCENTILE.fullmatch(statistic)
                result[f"{metric}_{statistic}"] = (
                    values.quantile(int(found[1]) / 100) if found else getattr(values, statistic)()
                )
        if not by and result.empty:  # no row is a group too, of which nothing is known
            counts = [f"{metric}_count" for metric in metrics if "count" in statistics]
            result = result.reindex([0]).fillna(dict.fromkeys(counts, 0))
            result = result.astype(dict.fromkeys(counts, "int64"))
        result.attrs["censored"] = int(rows[bound].notna().to_numpy().sum())
        result = result.reset_index(drop=not by)
        if sort is not None:
            name, ascending = sort.removeprefix("-"), not sort.startswith("-")
            result = result.sort_values(name, ascending=ascending, kind="stable")
        return result.head(limit).reset_index(drop=True) if limit else result


def check_columns(wanted: LabelFilter, columns: Sequence[str] | None, sort: str) -> None:
    """Raises InputError unless `Asking.query_labels` knows these columns."""
    known = _columns_of(wanted)
    _check_names("sort by", [sort.removeprefix("-")], known)
    _check_names("show", columns or known, known)


def check_statistics(
    wanted: LabelFilter,
    by: Sequence[str],
    statistics: Sequence[str],
    columns: Sequence[str] | None,
    sort: str | None,
) -> None:
    """Raises InputError unless `Asking.summarize_labels` can do this."""
    known = _columns_of(wanted)
    metrics = columns or list(METRICS)
    _check_names("group by", by, [name for name in known if name not in _NO_GROUPS])
    _check_names("summarize", metrics, [name for name in known if name in _NUMBERS])
    for name in statistics:
        if name not in _STATISTICS and not _PERCENTILE.fullmatch(name):
            there_is = ", ".join(_STATISTICS)
            raise InputError(f"no statistic {name!r}; there is {there_is}, and p1 to p99")
    if sort is not None:
        results = [f"{metric}_{statistic}" for metric in metrics for statistic in statistics]
        _check_names("sort by", [sort.removeprefix("-")], [*by, *results])


def _check_names(
    doing: str, names: Sequence[str] | _Columns, known: Sequence[str] | _Columns
) -> None:
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise InputError(f"cannot {doing} {name!r}; there is {', '.join(known)}")
        if name in seen:
            raise InputError(f"cannot {doing} {name!r} twice")
        seen.add(name)


def _columns_of(wanted: LabelFilter) -> _Columns:
    return _LABEL_COLUMNS if wanted.outcome is None else _ATTEMPT_COLUMNS


def _matching(session: Session, wanted: LabelFilter, what: Sequence[Any]) -> _Query:
    """Selects this from the labels or attempts that pass the filter."""
    row = LabelRow if wanted.outcome is None else MeasurementRow
    return restricted(session, _joined(row, what), wanted)


def _joined(row: type[LabelRow | MeasurementRow], what: Sequence[Any]) -> _Query:
    """Selects this from labels or attempts, each with its configuration and its device."""
    return (
        select(*what)
        .select_from(row)
        .join(ConfigurationRow, ConfigurationRow.id == row.configuration_id)
        .join(DeviceRow, DeviceRow.id == row.device_id)
    )


def restricted(session: Session, query: _Query, wanted: LabelFilter) -> _Query:
    """The query, of labels or attempts with configurations and devices, with these conditions."""
    columns = _columns_of(wanted)
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


def _frame(rows: Sequence[Any], columns: list[str]) -> pd.DataFrame:
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
