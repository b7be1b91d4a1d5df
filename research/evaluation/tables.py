"""Display of an evaluation: a bar while it runs, then tables, the honest splits first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from research.evaluation.benchmark import SPLIT_TITLES, SplitKind
from trappm.profiler.text import number_text
from trappm.terminal.progress_bars import LiveBar
from trappm.terminal.tables import console, print_table

COLUMNS = ("MAPE_%", "median_%", "CRPS_%", "coverage_%", "within_10_%", "tau", "RMSE")
_WITH_DEVIATION = frozenset({"mape", "median_ape"})
"""Errors whose deviation over seeds a table has room for; JSON has all."""
_KEYS = ("mape", "median_ape", "crps", "coverage", "within_10_percent", "kendall_tau", "rmse")


class EvaluationDisplay(LiveBar):
    """A bar on standard error, so that standard output is the report alone; lines in a file."""

    def __init__(self) -> None:
        super().__init__(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("to go"),
            TimeRemainingColumn(),
            to=Console(stderr=True, highlight=False),
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.line_below = "reading"
        self._total, self._shown_percent = 0, 0

    def show(self, done: int, total: int, what: str) -> None:
        self._safely(lambda: self._show(done, total, what))

    def _show(self, done: int, total: int, what: str) -> None:
        if total != self._total:  # another stage, whose pace is its own
            self._bar.reset(self._task, total=total)
            self._total, self._shown_percent = total, 0
        self._bar.line_below = what
        self._bar.update(self._task, completed=done)
        percent = 100 * done // max(total, 1)
        if not self._console.is_terminal and percent >= self._shown_percent + 10:
            self._shown_percent = percent
            self._console.print(f"{percent} %: {what}", markup=False, soft_wrap=True)


def print_evaluation(report: Mapping[str, Any]) -> None:
    """Print the tables of a report, of splits or of two files."""
    results, about = report["results"], f"{report['metric']} on {report['device']}"
    if "train" in report:
        train, counts = report["train"], report["test"]
        console().print(
            f"{about}: {train['count']} labels to learn from, {counts['judged']} to judge by; "
            f"{counts['architectures_in_training']} of its {counts['architectures']} architectures "
            "are in the training file"
        )
        parts = {"": results}
    else:
        counts = report["labels"]
        console().print(
            f"{about}: {counts['count']} labels of {counts['architectures']} architectures, "
            f"{counts['judged']} of them judged"
        )
        parts = {SPLIT_TITLES[k]: [r for r in results if r["split"] == k] for k in SplitKind}
    for reason, count in counts["left_out"].items():
        console().print(f"{count} left out: {reason}", style="dim")
    for title, of_part in parts.items():
        _print_part(title, of_part)


def _print_part(title: str, results: Sequence[Mapping[str, Any]]) -> None:
    whole = [r for r in results if r.get("labels") is None]
    if not whole:
        return
    print_table(title, ("estimator", *COLUMNS), [_row(r) for r in whole])
    if with_spikes := [r for r in whole if r.get("without_spikes")]:
        rows = [_row(r, "without_spikes") for r in with_spikes]
        print_table("without spikes", ("estimator", *COLUMNS), rows)
    died = [(_name(r), r["out_of_memory"]) for r in whole if r.get("out_of_memory")]
    if died:
        print_table(
            "runs out of memory, by the median",
            ("estimator", "died", "precision", "recall"),
            [(name, d["died"], d["precision"], d["recall"]) for name, d in died],
        )
    # MAPE and RMSE of each family, as in the paper's tables.
    families = sorted({family for r in whole for family in r["by_family"]})
    known = [[family, *(r["by_family"].get(family) for r in whole)] for family in families]
    rows = [
        [family, *(e and f"{e['mape']:.2f} / {number_text(e['rmse'])}" for e in errors)]
        for family, *errors in known
    ]
    columns = ("family", *(_name(r) for r in whole))
    print_table(": ".join(filter(None, ("by family, MAPE % / RMSE", title))), columns, rows)
    if few := [r for r in results if r.get("labels") is not None]:
        rows = [[r["labels"], *_row(r)] for r in sorted(few, key=lambda r: r["labels"])]
        print_table(f"from few labels: {title}", ("labels", "estimator", *COLUMNS), rows)


def _row(result: Mapping[str, Any], which: str = "accuracy") -> list[Any]:
    errors, spread = result.get(which) or {}, result.get(f"{which}_deviation") or {}
    cells: list[Any] = [_name(result)]
    for key in _KEYS:
        value, deviation = errors.get(key), spread.get(key)
        if value is None:
            cells.append(None)
        elif deviation is None or key not in _WITH_DEVIATION:
            cells.append(number_text(value))
        else:
            cells.append(f"{value:.2f} ± {deviation:.2f}")
    return cells


def _name(result: Mapping[str, Any]) -> str:
    return f"{result['estimator']}{', started' if result['transferred'] else ''}"
