"""Figures of docs/research/accuracy.md, recomputed from the published sheets.

Missing traces are created first, which takes about a second for each of 1,400 architectures, and
stored in TRAPPM_HOME.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
import yaml

from research.data import data_folder
from research.evaluation.benchmark import SplitKind
from research.evaluation.evaluation import Request, evaluate_splits
from research.evaluation.label_files import read_usable
from research.evaluation.workbench import CORES, Processes, Workbench

RECORDED = Path(__file__).with_suffix(".yaml")
TOLERANCE = 0.1
"""Allowed increase of a figure over the recorded one, in percentage points."""
COVERAGE = 90.0
KEYS = ["what", "split", "labels"]
FIGURES = ["mape", "median_ape", "coverage"]


def recorded(path: Path = RECORDED) -> pd.DataFrame:
    """Return the recorded figures in percent, by label sheet, split and number of labels."""
    rows = [
        {"what": what, **figures}
        for what, sheet in yaml.safe_load(path.read_text()).items()
        for figures in sheet["figures"]
    ]
    return pd.DataFrame(rows).astype({"labels": str}).set_index(KEYS)


def computed(what: str, sheet: Mapping[str, Any], processes: int) -> pd.DataFrame:
    """Train and evaluate `ours` on the splits of one sheet with recorded figures."""
    figures, data = sheet["figures"], data_folder()
    usable = read_usable(data / sheet["usable"]) if "usable" in sheet else None
    request = Request(
        bench=Workbench(metric=sheet["metric"], processes=processes, usable=usable),
        estimators=["ours"],
        label_counts=sorted({f["labels"] for f in figures} - {"all"}),
    )
    kinds = [kind for kind in SplitKind if any(f["split"] == kind for f in figures)]
    report = evaluate_splits(request, kinds, labels=data / sheet["labels"], device=None)
    rows = [
        {"what": what, "split": result["split"], "labels": str(result["labels"] or "all")}
        | {name: result["accuracy"][name] for name in FIGURES}
        for result in report["results"]
    ]
    return pd.DataFrame(rows).set_index(KEYS)


def compare(before: pd.DataFrame, now: pd.DataFrame) -> pd.DataFrame:
    """Return recorded and new figures, and a mask of rows that are worse.

    Errors must not grow and coverage must not move away from 90 %, by more than `TOLERANCE`.
    """
    now = now.loc[before.index]
    grown = now - before
    grown["coverage"] = (now.coverage - COVERAGE).abs() - (before.coverage - COVERAGE).abs()
    table = pd.concat({"recorded": before, "now": now.round(2)}, axis=1)
    table["is_worse"] = (grown > TOLERANCE).any(axis=1)
    return table


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Exit with status 1 if a figure is worse.")
    ] = False,
    processes: Processes = CORES,
) -> None:
    """Print the recorded and the new figures."""
    sheets = yaml.safe_load(RECORDED.read_text())
    now = pd.concat(computed(what, sheet, processes) for what, sheet in sheets.items())
    table = compare(recorded(), now)
    print(table.to_string())
    if check and table.is_worse.any():
        raise typer.Exit(1)
