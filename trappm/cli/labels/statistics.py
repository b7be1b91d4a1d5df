"""Statistics of labels by group, for `trappm labels query --by --agg`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS
from trappm.store.labels import columns_of

if TYPE_CHECKING:
    import pandas as pd

    from trappm.store import LabelFilter

_NUMBERS = (*METRICS, "memory_above_mib", "energy_j", "duration_s")
_NO_GROUPS = {"id", "message", "created_at", "started_at", *_NUMBERS}
_STATISTICS = ("count", "mean", "std", "min", "median", "max")
_PERCENTILE = re.compile(r"p([1-9][0-9]?)")


@dataclass(frozen=True)
class Statistics:
    """Statistics of metrics by group.

    Raises:
        InputError: A column or statistic is unknown.
    """

    wanted: LabelFilter
    by: Sequence[str]
    """Columns whose values make a group; without any, all rows are one group."""
    statistics: Sequence[str]
    """count (of values), mean, std, min, median, max, and percentiles p1 to p99."""
    metrics: Sequence[str]
    sort: str | None
    """Column of the result; the groups by default."""

    def __post_init__(self) -> None:
        known = columns_of(self.wanted)
        _check("group by", self.by, [name for name in known if name not in _NO_GROUPS])
        _check("summarize", self.metrics, [name for name in known if name in _NUMBERS])
        for name in self.statistics:
            if name not in _STATISTICS and not _PERCENTILE.fullmatch(name):
                there_is = ", ".join(_STATISTICS)
                raise InputError(f"no statistic {name!r}; there is {there_is}, and p1 to p99")
        if self.sort is not None:
            results = [f"{m}_{statistic}" for m in self.metrics for statistic in self.statistics]
            _check("sort by", [self.sort.removeprefix("-")], [*self.by, *results])

    @property
    def needed(self) -> list[str]:
        """Columns of the rows that `of` takes."""
        bounds = [] if self.wanted.outcome is not None else ["memory_above_mib"]
        return [*dict.fromkeys([*self.by, *self.metrics, *bounds])]

    def of(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return one row per group; `attrs["censored"]` is the number of censored labels."""
        import pandas as pd

        groups = rows.groupby(list(self.by), dropna=False) if self.by else rows.groupby(lambda _: 0)
        columns = {
            f"{metric}_{statistic}": _statistic(groups[metric], statistic)
            for metric in self.metrics
            for statistic in self.statistics
        }
        result = pd.DataFrame(columns).reset_index(drop=not self.by)
        if "memory_above_mib" in rows:
            result.attrs["censored"] = int(rows["memory_above_mib"].notna().sum())
        if self.sort is not None:
            name, ascending = self.sort.removeprefix("-"), not self.sort.startswith("-")
            result = result.sort_values(name, ascending=ascending, kind="stable")
        return result


def _statistic(groups: Any, name: str) -> pd.Series[Any]:
    percentile = _PERCENTILE.fullmatch(name)
    of_groups = getattr(groups, "quantile" if percentile else name)
    result: pd.Series[Any] = of_groups(int(percentile[1]) / 100) if percentile else of_groups()
    return result


def _check(doing: str, names: Iterable[str], known: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise InputError(f"cannot {doing} {name!r}; there is {', '.join(known)}")
        if name in seen:
            raise InputError(f"cannot {doing} {name!r} twice")
        seen.add(name)
