"""Labels for people: tables, and everything about one label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trappm.label_store import without_nan
from trappm.profiler.models.known_names import is_prefixed, unit_of
from trappm.profiler.records import METRICS
from trappm.terminal.plots import sample_plot
from trappm.terminal.tables import cell, print_line, print_table

if TYPE_CHECKING:
    import pandas as pd

    from trappm.profiler.records import Measurement
    from trappm.store import LabelRecord

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
        print_line(f"memory in MiB: {_join_listed(measurement.memory_detail_mib)}", style="dim")
    if measurement.step is not None:
        spread = {name: getattr(measurement.step, key) for key, name in SUMMARY.items()}
        print_line(f"\nstep time in ms: {_join_listed(spread)}")
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


def _join_listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {cell(float(value))}" for name, value in values.items())
