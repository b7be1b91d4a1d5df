"""Statistics of labels by group, for `trappm labels query --by --agg`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS
from trappm.store.labels import columns_of

if TYPE_CHECKING:
    import pandas as pd

    from trappm.store import LabelFilter, Store

_NUMBERS = (*METRICS, "memory_above_mib", "energy_j", "duration_s")
_NO_GROUPS = {"id", "message", "created_at", "started_at", *_NUMBERS}
_STATISTICS = ("count", "mean", "std", "min", "median", "max")
_PERCENTILE = re.compile(r"p[1-9][0-9]?")


def label_statistics(
    store: Store,
    wanted: LabelFilter,
    *,
    by: Sequence[str],
    statistics: Sequence[str],
    metrics: Sequence[str],
    sort: str | None,
) -> pd.DataFrame:
    """Return statistics of metrics, one row per group; `attrs["censored"]` counts censored labels.

    Args:
        store: Label store.
        wanted: Filter of the labels or attempts.
        by: Columns to group by; without any, all rows are one group.
        statistics: count (of values), mean, std, min, median, max, and percentiles p1 to p99.
        metrics: Columns of numbers.
        sort: Column of the result (default: the groups); with a leading `-` in descending order.

    Raises:
        InputError: A column or statistic is unknown.
    """
    import pandas as pd

    known = columns_of(wanted)
    _check("group by", by, [name for name in known if name not in _NO_GROUPS])
    _check("summarize", metrics, [name for name in known if name in _NUMBERS])
    for name in statistics:
        if name not in _STATISTICS and not _PERCENTILE.fullmatch(name):
            raise InputError(
                f"no statistic {name!r}; there is {', '.join(_STATISTICS)}, and p1 to p99"
            )
    results = [f"{metric}_{name}" for metric in metrics for name in statistics]
    if sort is not None:
        _check("sort by", [sort.removeprefix("-")], [*by, *results])
    bounds = [] if wanted.outcome is not None else ["memory_above_mib"]
    rows = store.labels.query(wanted, columns=[*dict.fromkeys([*by, *metrics, *bounds])], sort="id")
    groups = rows.groupby(list(by), dropna=False) if by else rows.groupby(lambda _: 0)
    values = [
        groups[metric].quantile(int(name[1:]) / 100)
        if _PERCENTILE.fullmatch(name)
        else getattr(groups[metric], name)()
        for metric in metrics
        for name in statistics
    ]
    result = pd.DataFrame(dict(zip(results, values, strict=True))).reset_index(drop=not by)
    if bounds:
        result.attrs["censored"] = int(rows["memory_above_mib"].notna().sum())
    if sort is not None:
        ascending = not sort.startswith("-")
        result = result.sort_values(sort.removeprefix("-"), ascending=ascending, kind="stable")
    return result


def _check(doing: str, names: Iterable[str], known: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise InputError(f"cannot {doing} {name!r}; there is {', '.join(known)}")
        if name in seen:
            raise InputError(f"cannot {doing} {name!r} twice")
        seen.add(name)
