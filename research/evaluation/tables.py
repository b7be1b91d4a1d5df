"""How an evaluation is shown: a bar while it runs, then tables, the honest splits first."""

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
from trappm.profiler.number_text import number_text
from trappm.terminal.progress_bars import LiveBar
from trappm.terminal.tables import console, print_table

COLUMNS = ("MAPE_%", "median_%", "CRPS_%", "coverage_%", "within_10_%", "tau", "RMSE")
_WITH_DEVIATION = frozenset({"mape", "median_ape"})
"""Whose deviation over seeds a table has room for; JSON has all."""
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
    """The tables of a report, of splits or of two files."""
    if "train" in report:
        _print_files(report)
        return
    labels = report["labels"]
    console().print(
        f"{report['metric']} on {report['device']}: {labels['count']} labels of "
        f"{labels['architectures']} architectures, {labels['judged']} of them judged"
    )
    _print_left_out(labels)
    results = report["results"]
    for kind in SplitKind:
        whole = [r for r in results if r["split"] == kind and r["labels"] is None]
        if not whole:
            continue
        print_table(SPLIT_TITLES[kind], ("estimator", *COLUMNS), [_row(r) for r in whole])
        _print_spikes_and_deaths(whole)
        _print_families(f"by family: {SPLIT_TITLES[kind]}", whole)
        few = [r for r in results if r["split"] == kind and r["labels"] is not None]
        if few:
            rows = [(r["labels"], *_row(r)) for r in sorted(few, key=lambda r: r["labels"])]
            print_table(f"from few labels: {SPLIT_TITLES[kind]}",
                        ("labels", "estimator", *COLUMNS), rows)  # fmt: skip


def _print_files(report: Mapping[str, Any]) -> None:
    train, test = report["train"], report["test"]
    console().print(
        f"{report['metric']} on {report['device']}: {train['count']} labels to learn from, "
        f"{test['judged']} to judge by; {test['architectures_in_training']} of its "
        f"{test['architectures']} architectures are in the training file"
    )
    _print_left_out(test)
    results = report["results"]
    print_table("", ("estimator", *COLUMNS), [_row(r) for r in results])
    _print_spikes_and_deaths(results)
    _print_families("by family", results)


def _print_left_out(counts: Mapping[str, Any]) -> None:
    for reason, count in counts["left_out"].items():
        console().print(f"{count} left out: {reason}", style="dim")


def _print_spikes_and_deaths(results: Sequence[Mapping[str, Any]]) -> None:
    with_spikes = [r for r in results if r.get("without_spikes")]
    if with_spikes:
        rows = [_row(r, "without_spikes") for r in with_spikes]
        print_table("without spikes", ("estimator", *COLUMNS), rows)
    died = [(_name(r), r["out_of_memory"]) for r in results if r.get("out_of_memory")]
    if died:
        print_table(
            "runs out of memory, by the median",
            ("estimator", "died", "precision", "recall"),
            [(name, d["died"], d["precision"], d["recall"]) for name, d in died],
        )


def _print_families(title: str, results: Sequence[Mapping[str, Any]]) -> None:
    """MAPE and RMSE of each family, as in the paper's tables, for every estimator."""
    families = sorted({family for r in results for family in r["by_family"]})
    rows = []
    for family in families:
        cells: list[Any] = [family]
        for result in results:
            errors = result["by_family"].get(family)
            cells.append(
                None if errors is None else f"{errors['mape']:.2f} / {number_text(errors['rmse'])}"
            )
        rows.append(cells)
    print_table(f"{title}, MAPE % / RMSE", ("family", *(_name(r) for r in results)), rows)


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
