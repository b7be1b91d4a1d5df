"""Labels for people: tables, statistics by group, and everything about one label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trappm.label_store import without_nan
from trappm.profiler.errors import InputError
from trappm.profiler.models.known_names import is_prefixed, unit_of
from trappm.profiler.records import METRICS
from trappm.store.labels import NUMBERS, columns_of
from trappm.terminal.plots import sample_plot
from trappm.terminal.tables import cell, print_line, print_table

if TYPE_CHECKING:
    import pandas as pd

    from trappm.profiler.records import Measurement
    from trappm.store import LabelFilter, LabelRecord, Store

UNITS = {**METRICS, "energy_j": "J"}

FIRST_COLUMNS = (
    "id", "architecture", "batch_size", "input_size", "tokens", "px", "device", "outcome",
    *METRICS, "memory_above_mib", "failed_in",
)  # fmt: skip
"""First columns of a table of labels; settings that differ follow."""
SETTINGS = (
    "precision", "memory_format", "optimizer", "phase", "execution", "protocol", "provenance",
)  # fmt: skip
"""Columns that go into the line below the table if all labels agree."""
OPTIONAL = {"tokens", "px", *METRICS, "memory_above_mib", "failed_in"}

ATTEMPT_COLUMNS = ("id", "outcome", "started_at", "protocol", "duration_s", *METRICS)
UNKNOWN_YEAR = 1970
"""Year of attempts whose source has no time."""
SUMMARY = {"median_ms": "median", "mean_ms": "mean", "iqr_ms": "IQR", "p95_ms": "p95"}


_NO_GROUPS = {"id", "message", "created_at", "started_at", *NUMBERS}
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
    _check("summarize", metrics, [name for name in known if name in NUMBERS])
    for name in statistics:
        if name not in _STATISTICS and not _PERCENTILE.fullmatch(name):
            raise InputError(
                f"no statistic {name!r}; there is {', '.join(_STATISTICS)}, and p1 to p99"
            )
    if sort is not None:
        results = [f"{metric}_{name}" for metric in metrics for name in statistics]
        _check("sort by", [sort.removeprefix("-")], [*by, *results])
    bounds = [] if wanted.outcome is not None else ["memory_above_mib"]
    rows = store.labels.query(wanted, columns=[*dict.fromkeys([*by, *metrics, *bounds])], sort="id")
    groups = rows.groupby(list(by), dropna=False) if by else rows.groupby(lambda _: 0)
    values = {
        f"{metric}_{name}": getattr(groups[metric], name)()
        if name in _STATISTICS
        else groups[metric].quantile(int(name[1:]) / 100)
        for metric in metrics
        for name in statistics
    }
    result = pd.DataFrame(values).reset_index(drop=not by)
    if bounds:
        result.attrs["censored"] = int(rows["memory_above_mib"].notna().sum())
    if sort is None:
        return result
    ascending = not sort.startswith("-")
    return result.sort_values(sort.removeprefix("-"), ascending=ascending, kind="stable")


def _check(doing: str, names: Iterable[str], known: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name not in known:
            raise InputError(f"cannot {doing} {name!r}; there is {', '.join(known)}")
        if name in seen:
            raise InputError(f"cannot {doing} {name!r} twice")
        seen.add(name)


def print_labels(frame: pd.DataFrame, what: str = "labels") -> None:
    """Print labels as a table, and below it the settings that all of them share."""
    if frame.empty:
        print_line(f"0 {what}")
        return
    clean = _with_units(without_nan(frame))
    settings = [column for column in SETTINGS if column in clean]
    same = [column for column in settings if clean[column].nunique(dropna=False) == 1]
    columns = [
        column for column in FIRST_COLUMNS
        if column in clean and (column not in OPTIONAL or clean[column].notna().any())
    ]  # fmt: skip
    shown = [*columns, *(column for column in settings if column not in same)]
    print_table(
        f"{len(clean)} {what}" if len(clean) != 1 else "", shown, clean[shown].values.tolist()
    )
    _print_messages(clean)
    if same:
        notes = [f"{column} {clean[column].iloc[0]}" for column in same]
        notes += [f"no {column}" for column in METRICS if column in clean and column not in columns]
        print_line(f"all: {', '.join(notes)}; --json and --csv give every column", style="dim")


def _print_messages(attempts: pd.DataFrame) -> None:
    """Print why attempts failed, one line per attempt."""
    if "message" in attempts:
        for number, message in attempts[["id", "message"]].dropna().itertuples(index=False):
            print_line(f"{number}: {cell(message)}", style="dim")


def print_rows(frame: pd.DataFrame) -> None:
    """Print all columns of a frame."""
    clean = without_nan(frame)
    rows = clean.values.tolist()
    title = f"{len(rows)} rows" if len(rows) != 1 else ""
    print_table(title, list(clean.columns), rows, every_column=True)


def print_label(label: LabelRecord, measurement: Measurement, attempts: pd.DataFrame) -> None:
    """Print everything about one label: metrics, spread, attempts, environment, raw samples."""
    rows: list[tuple[Any, ...]] = []
    gaps: dict[str, list[str]] = {}
    for metric, unit in UNITS.items():
        value, note = getattr(label, metric), measurement.missing.get(metric)
        if metric == "memory_mib" and label.memory_above_mib is not None:
            note = f"more than {label.memory_above_mib:,.0f} MiB: memory ran out"
        if value is None:
            gaps.setdefault(note or "not measured", []).append(metric)
        else:
            rows.append((metric, value, unit))
    title = f"label {label.id}: {label.configuration}, on {label.device}"
    print_table(title, ("metric", "value", "unit"), rows)
    for reason, metrics in gaps.items():
        print_line(f"no {', '.join(metrics)}: {reason}")
    print_line(
        f"{label.provenance} by protocol {label.protocol}, "
        f"label of {label.created_at[:19]} UTC, stack {label.fingerprint}",
        style="dim",
    )
    if measurement.memory_detail_mib:
        print_line(f"memory in MiB: {_listed(measurement.memory_detail_mib)}", style="dim")
    if measurement.step is not None:
        spread = {name: getattr(measurement.step, key) for key, name in SUMMARY.items()}
        print_line(f"\nstep time in ms: {_listed(spread)}")
    samples = measurement.step_samples_ms
    if len(samples) > 1:
        print_line(sample_plot(samples, title="step time in ms"))
    clean = without_nan(attempts)
    title = "the one attempt" if len(clean) == 1 else f"{len(clean)} attempts"
    clean["started_at"] = [
        f"{time:%Y-%m-%d %H:%M:%S}" if time.year > UNKNOWN_YEAR else None
        for time in clean["started_at"]
    ]
    shown = [c for c in ATTEMPT_COLUMNS if clean[c].notna().any()]
    print_line("")
    print_table(title, shown, clean[shown].values.tolist())
    _print_messages(clean)
    facts = [(key, _fact(value)) for key, value in sorted(measurement.environment.items())]
    print_line("")
    print_table("environment", ("fact", "value"), facts)


def _fact(value: Any) -> str:
    """Return the text of a fact of an environment."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_fact(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_fact, value)) or "none"
    return cell(value)


def _with_units(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one column of input sizes per unit if there are transformers."""
    if not {"architecture", "input_size"} <= set(frame) or not any(
        map(is_prefixed, frame["architecture"])
    ):
        return frame
    units = frame["architecture"].map(unit_of)
    sizes = frame["input_size"]
    return frame.drop(columns="input_size").assign(
        **{unit: sizes.where(units == unit, None) for unit in ("tokens", "px")}
    )


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {cell(float(value))}" for name, value in values.items())
