"""Labels from any file that the importers read, by what is in it, without recording them.

A published sheet is known by its columns; everything else is an export or JSON lines of
the profiler. timm's sheets have in their names what was measured: one whose name does not is read
by the name of another file, beside which it is given.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

from research.importers import gpumemnet, node_steps, timm_results
from trappm.profiler.errors import InputError
from trappm.profiler.records import Measurement, Outcome
from trappm.store.exchange.files import check_columns, checked_size, read_file

METRICS = {
    "memory": "memory_mib",
    "step-time": "step_time_ms",
    "power": "power_w",
    "energy": "energy_j",
}
"""Names of metrics on the command line, and their columns."""

MAX_LABELS = 200_000
_MAX_HEADER = 64 << 10


def metric_column(name: str) -> str:
    """The column of a metric, by its short name or its own.

    Raises:
        InputError: there is no such metric.
    """
    column = METRICS.get(name.replace("_", "-"), name)
    if column not in METRICS.values():
        raise InputError(f"no metric {name!r}; there are: {', '.join(METRICS)}")
    return column


def read_labels(path: Path, named_like: Path | None = None) -> list[Measurement]:
    """What of a file can be learned from: runs that succeeded, and those out of memory.

    Args:
        path: of the file.
        named_like: a sheet whose name has what was measured, where that of `path` does not.

    Raises:
        InputError: the file cannot be read, a row of it cannot be, or there are too many.
    """
    columns = _columns(path) if path.suffix == ".csv" else set()
    labels: list[Measurement] = []
    reasons: Counter[str] = Counter()
    if set(gpumemnet.LOGGED) <= columns:
        verdicts = iter(gpumemnet.verdicts(path))
    elif columns & {"train_step_time", "infer_step_time"}:
        verdicts = iter(timm_results.verdicts(path, named_like=named_like))
    elif node_steps.sheet_of(columns) is not None:
        verdicts = iter(node_steps.verdicts(path))
    elif path.suffix != ".csv":
        verdicts = read_file(path)
    else:
        raise InputError(
            f"{path.name} has the columns {', '.join(sorted(columns))[:200]}; give an export as "
            f"Parquet or JSON lines, a sheet of GPUMemNet ({', '.join(gpumemnet.LOGGED)}), of timm "
            f"(train_step_time or infer_step_time), or of {', '.join(node_steps.SOURCES)}"
        )
    for verdict in verdicts:
        reasons[verdict.reason] += 1
        known = verdict.measurement
        if known is not None and known.outcome in {Outcome.OK, Outcome.OOM}:
            labels.append(known)
        if len(labels) > MAX_LABELS:
            raise InputError(f"{path.name} has more than {MAX_LABELS:,} labels; give a part of it")
    if not labels:
        why = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        raise InputError(f"{path.name} has no label that can be learned from: {why or 'no rows'}")
    return labels


def _columns(path: Path) -> set[str]:
    with checked_size(path).open(encoding="utf-8-sig", newline="") as file:
        try:
            return set(next(csv.reader([file.readline(_MAX_HEADER)]), []))
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{path.name} is no CSV file: {error}") from error


def read_usable(path: Path) -> dict[tuple[str, int], bool]:
    """The rows that a reading of a sheet calls usable, and whether each is a spike.

    Args:
        path: of a CSV file with the columns architecture, batch_size, class and spike.

    Raises:
        InputError: the file or a row of it cannot be read.
    """
    usable = {}
    with checked_size(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            check_columns(reader.fieldnames or ())
            for row in reader:
                if row["class"] == "usable":
                    usable[row["architecture"], int(row["batch_size"])] = row["spike"] == "1"
        except (KeyError, ValueError, TypeError, csv.Error) as error:
            raise InputError(
                f"{path.name}, line {reader.line_num}: {type(error).__name__} {error}; it needs "
                "the columns architecture, batch_size, class and spike"
            ) from error
    return usable
