"""Labels read from files of any supported format, without recording them.

Published sheets are recognized by their columns; other files are exports or JSON lines of the
profiler. The settings of timm's sheets are in their file names, or in the name of another file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from research.importers import gpumemnet, milabench, node_steps, timm_results
from research.importers.sheets import read_rows
from trappm.profiler.errors import InputError
from trappm.profiler.records import Measurement, Outcome
from trappm.store.files import ParsedRow, read_file

METRICS = {
    "memory": "memory_mib",
    "step-time": "step_time_ms",
    "power": "power_w",
    "energy": "energy_j",
}
"""Columns of metrics by their names on the command line."""


def metric_column(name: str) -> str:
    """Return the column of a metric, by its short name or its own.

    Raises:
        InputError: The metric is unknown.
    """
    column = METRICS.get(name.replace("_", "-"), name)
    if column not in METRICS.values():
        raise InputError(f"Unknown metric {name!r}. Expected one of: {', '.join(METRICS)}")
    return column


def read_labels(path: Path, named_like: Path | None = None) -> list[Measurement]:
    """Return the labels of a file: runs that succeeded or ran out of memory.

    Args:
        path: The file.
        named_like: Sheet with the settings in its name, if the name of `path` has none.

    Raises:
        InputError: The file or a row of it cannot be read, or it has no labels.
    """
    labels: list[Measurement] = []
    reasons: Counter[str] = Counter()
    for row in _parse_rows(path, named_like):
        reasons[row.reason] += 1
        known = row.measurement
        if known is not None and known.outcome in {Outcome.OK, Outcome.OOM}:
            labels.append(known)
    if not labels:
        why = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        raise InputError(f"{path.name} has no usable label: {why or 'no rows'}")
    return labels


def _parse_rows(path: Path, named_like: Path | None) -> Iterable[ParsedRow]:
    if ".csv" not in path.suffixes:
        return read_file(path)
    columns = {*next(read_rows(path, frozenset(), dict), {})}
    if set(gpumemnet.LOGGED) <= columns:
        return gpumemnet.parse_rows(path)
    if columns & {"train_step_time", "infer_step_time"}:
        return timm_results.parse_rows(path, named_like=named_like)
    if columns >= milabench.COLUMNS:
        return milabench.parse_rows(path)
    if node_steps.sheet_of(columns) is not None:
        return node_steps.parse_rows(path)
    raise InputError(
        f"{path.name} has the columns {', '.join(sorted(columns))[:200]}; give an export as "
        f"Parquet or JSON lines, a sheet of GPUMemNet ({', '.join(gpumemnet.LOGGED)}), of timm "
        f"(train_step_time or infer_step_time), or of {', '.join(node_steps.SOURCES)}"
    )


def read_usable(path: Path) -> dict[tuple[str, int], bool]:
    """Return the usable rows of a sheet by architecture and batch size; True for a spike.

    Args:
        path: A CSV file with the columns architecture, batch_size, class and spike.

    Raises:
        InputError: The file or a row of it cannot be read.
    """
    needed = {"architecture", "batch_size", "class", "spike"}
    usable = {}
    for row in read_rows(path, needed, dict):
        if row["class"] == "usable":
            usable[row["architecture"], int(row["batch_size"])] = row["spike"] == "1"
    return usable
