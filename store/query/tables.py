"""Labels and attempts as tables: their columns, their order and their statistics.

Statistics are computed from the rows by one code, so that they are the same on every back end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS
from trappm.store.query.filters import LabelFilter, columns_of

if TYPE_CHECKING:
    import pandas as pd

_NUMBERS = (*METRICS, "memory_above_mib", "energy_j", "duration_s")
_TIMES = ("created_at", "started_at")
_NO_GROUPS = {"id", "message", *_NUMBERS, *_TIMES}

_STATISTICS = ("count", "mean", "std", "min", "median", "max")
_PERCENTILE = re.compile(r"p([1-9][0-9]?)")


def check_columns(wanted: LabelFilter, columns: Sequence[str] | None, sort: str) -> None:
    """Raises InputError unless `store.labels.query` knows these columns."""
    known = columns_of(wanted)
    _check_names("sort by", [sort.removeprefix("-")], known)
    _check_names("show", columns or known, known)


def check_statistics(
    wanted: LabelFilter,
    by: Sequence[str],
    statistics: Sequence[str],
    columns: Sequence[str] | None,
    sort: str | None,
) -> None:
    """Raises InputError unless `store.labels.summarize` can do this."""
    known = columns_of(wanted)
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


def _check_names(doing: str, names: Iterable[str], known: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise InputError(f"cannot {doing} {name!r}; there is {', '.join(known)}")
        if name in seen:
            raise InputError(f"cannot {doing} {name!r} twice")
        seen.add(name)


def summary_columns(
    wanted: LabelFilter, by: Sequence[str], columns: Sequence[str] | None
) -> list[str]:
    """The columns of labels or attempts that `summary` needs."""
    return [*dict.fromkeys([*by, *(columns or METRICS), *_bounds(wanted)])]


def summary(
    rows: pd.DataFrame,
    wanted: LabelFilter,
    *,
    by: Sequence[str],
    statistics: Sequence[str],
    columns: Sequence[str] | None,
    sort: str | None,
    limit: int | None,
) -> pd.DataFrame:
    """Statistics of these rows by group, as `store.labels.summarize` describes."""
    metrics = list(columns or METRICS)
    groups = rows.groupby(list(by), dropna=False) if by else rows.groupby(lambda _: 0)
    result = groups[metrics].size().to_frame()[[]]
    for metric in metrics:
        for statistic in statistics:
            values = groups[metric]
            percentile = _PERCENTILE.fullmatch(statistic)
            result[f"{metric}_{statistic}"] = (
                values.quantile(int(percentile[1]) / 100)
                if percentile
                else getattr(values, statistic)()
            )
    if not by and result.empty:  # no row is a group too, of which nothing is known
        counts = [f"{metric}_count" for metric in metrics if "count" in statistics]
        result = result.reindex([0]).fillna(dict.fromkeys(counts, 0))
        result = result.astype(dict.fromkeys(counts, "int64"))
    result.attrs["censored"] = int(rows[_bounds(wanted)].notna().to_numpy().sum())
    result = result.reset_index(drop=not by)
    if sort is not None:
        name, ascending = sort.removeprefix("-"), not sort.startswith("-")
        result = result.sort_values(name, ascending=ascending, kind="stable")
    return result.head(limit).reset_index(drop=True) if limit else result


def _bounds(wanted: LabelFilter) -> list[str]:
    return [name for name in ("memory_above_mib",) if name in columns_of(wanted)]


def frame_of(rows: Sequence[Any], columns: list[str]) -> pd.DataFrame:
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
