"""What replayed campaigns amount to: tables, and plots of error against labels and seconds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from research.evaluation.benchmark import TEST_SHARE
from research.replay.replay import Point
from research.replay.replays import Plan, Results
from trappm.terminal.plots import new_figure, save_png
from trappm.terminal.tables import console, print_table

Array = npt.NDArray[np.float64]

BASELINE = "random"
PAPER = {"memory_mib": 4.92, "step_time_ms": 9.51, "power_w": 5.01}
"""Errors (MAPE, percent) of the TraPPM paper, Table III: what labels are counted to."""
BAND = 0.95
"""The share of such plots in which the band around a curve holds the mean over all seeds."""


class BudgetRow(TypedDict):
    """Where the campaigns of a strategy stand after so many labels, in the mean over seeds."""

    labels: int
    mape: float
    error: float | None
    """Standard error of the mean."""
    median_ape: float
    died: float
    seconds: float | None
    difference: NotRequired[float]
    """Of the MAPE to the baseline's on the same splits, and its standard error."""
    difference_error: NotRequired[float | None]


class StrategyRow(TypedDict):
    """A strategy with a learner; what compares it with the baseline is there if that was run."""

    learner: str
    strategy: str
    seeds: int
    budgets: list[BudgetRow]
    area_percent: NotRequired[float]
    area_error: NotRequired[float | None]
    wins: NotRequired[int]
    seconds_percent: NotRequired[float | None]
    seconds_error: NotRequired[float | None]


def summary(results: Results, plan: Plan, baseline: str = BASELINE) -> list[StrategyRow]:
    """For each learner and strategy what came of it, over the seeds that the baseline has as well.

    Returns:
        learner, strategy, seeds; by budget mape, its standard error, the difference to the
        baseline on the same seeds and its standard error, seconds and labels that died; the area
        under the curve over the logarithm of labels against that of the baseline, and the seconds
        to its errors, both in percent with a standard error; on how many seeds the area is less.
    """
    table: dict[tuple[str, str], dict[int, list[Point]]] = defaultdict(dict)
    for job, points in results.points.items():
        if job.seed in plan.seeds:
            table[job.learner, job.strategy][job.seed] = points
    rows = []
    for learner in plan.learners:
        base = table.get((learner, baseline), {})
        for strategy in plan.strategies:
            own = table.get((learner, strategy), {})
            seeds = sorted(own.keys() & base.keys()) if base else sorted(own)
            if seeds:
                rows.append(_row(learner, strategy, seeds, own, base, plan.budgets))
    return rows


def _row(
    learner: str,
    strategy: str,
    seeds: Sequence[int],
    own: Mapping[int, Sequence[Point]],
    base: Mapping[int, Sequence[Point]],
    budgets: Sequence[int],
) -> StrategyRow:
    errors = np.array([[p.mape for p in own[s]] for s in seeds])
    row: StrategyRow = {
        "learner": learner,
        "strategy": strategy,
        "seeds": len(seeds),
        "budgets": [
            {
                "labels": labels,
                "mape": float(errors[:, i].mean()),
                "error": standard_error(errors[:, i]),
                "median_ape": float(np.mean([own[s][i].median_ape for s in seeds])),
                "died": float(np.mean([own[s][i].died for s in seeds])),
                "seconds": _mean([own[s][i].seconds for s in seeds]),
            }
            for i, labels in enumerate(budgets)
        ],
    }
    if base:
        drawn = np.array([[p.mape for p in base[s]] for s in seeds])
        for i, point in enumerate(row["budgets"]):
            gaps = errors[:, i] - drawn[:, i]
            point["difference"] = float(gaps.mean())
            point["difference_error"] = standard_error(gaps)
        percent = 100 * (area(np.log(budgets), errors) / area(np.log(budgets), drawn) - 1.0)
        row["area_percent"] = float(percent.mean())
        row["area_error"] = standard_error(percent)
        row["wins"] = int((percent < 0).sum())
        campaigns = [own[s] for s in seeds], [base[s] for s in seeds]
        row["seconds_percent"] = seconds_to_same_error(*campaigns)
        row["seconds_error"] = jackknife_error(*campaigns)
    return row


def area(places: Array, values: Array) -> Array:
    """Mean of each row of values (k, m) over places (m), by trapezoids (k)."""
    if len(places) == 1:
        only: Array = values[:, 0]
        return only
    widths = np.diff(places)
    means: Array = (values[:, 1:] + values[:, :-1]) / 2 @ widths / widths.sum()
    return means


def _overlap(test_share: float) -> float:
    """Labels that judge for each one that teaches, in a split."""
    return test_share / (1 - test_share)


def standard_error(values: Array, test_share: float = TEST_SHARE) -> float | None:
    """Of the mean over splits of one sheet; None of a single value, which does not show how values
    scatter.

    The splits share most of what they train and judge on, so the mean scatters more than that of
    independent ones would (Nadeau and Bengio, Machine Learning 52, 2003, section 3).
    """
    n = len(values)
    return float(np.std(values, ddof=1) * np.sqrt(1 / n + _overlap(test_share))) if n > 1 else None


def seconds_to_same_error(
    own: Sequence[Sequence[Point]], base: Sequence[Sequence[Point]]
) -> float | None:
    """Mean difference, in percent, of the seconds to reach the errors of the baseline's curve.

    Both curves are means over seeds, made to fall, and compared in the logarithm of seconds at
    errors that both reach.
    """
    curves = []
    for many in (own, base):
        seconds = np.array([[p.seconds or np.nan for p in points] for points in many]).mean(axis=0)
        errors = np.array([[p.mape for p in points] for points in many]).mean(axis=0)
        curves.append((np.log(seconds), np.minimum.accumulate(errors)))
    if not all(np.isfinite(seconds).all() for seconds, _ in curves):
        return None
    low = max(errors[-1] for _, errors in curves)
    high = min(errors[0] for _, errors in curves)
    if low >= high:
        return None
    levels = np.linspace(low, high, 50)
    ours, theirs = (np.interp(levels, errors[::-1], seconds[::-1]) for seconds, errors in curves)
    return 100 * float(np.expm1((ours - theirs).mean()))


def jackknife_error(
    own: Sequence[Sequence[Point]],
    base: Sequence[Sequence[Point]],
    test_share: float = TEST_SHARE,
) -> float | None:
    """Standard error of `seconds_to_same_error`, which is not a mean of splits: from what it
    becomes without each of them (jackknife). None where one of those is not known."""
    n = len(own)
    without = [
        seconds_to_same_error([*own[:i], *own[i + 1 :]], [*base[:i], *base[i + 1 :]])
        for i in range(n if n > 1 else 0)
    ]
    known = np.array([value for value in without if value is not None])
    if len(known) < max(n, 2):
        return None
    return float(np.sqrt((n - 1) * known.var() * (1 + n * _overlap(test_share))))


def labels_to(row: StrategyRow, target: float) -> float | None:
    """Labels at which a strategy's mean error first falls to the target, between budgets in the
    logarithm; None if it does not, and the first budget if it starts below."""
    budgets = row["budgets"]
    if budgets[0]["mape"] <= target:
        return float(budgets[0]["labels"])
    for before, after in itertools.pairwise(budgets):
        if after["mape"] <= target:
            share = (before["mape"] - target) / (before["mape"] - after["mape"])
            logs = np.log([before["labels"], after["labels"]])
            return float(np.exp(logs[0] + share * (logs[1] - logs[0])))
    return None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def print_summary(rows: Sequence[StrategyRow], metric: str, baseline: str = BASELINE) -> None:
    """One table a learner, best strategy first."""
    target = PAPER.get(metric)
    for learner, group in itertools.groupby(rows, key=lambda row: str(row["learner"])):
        ordered = sorted(group, key=lambda row: row.get("area_percent", 0.0))
        budgets = [point["labels"] for point in ordered[0]["budgets"]]
        columns = ["strategy", "seeds", *(str(b) for b in budgets), "area,_%", "wins"]
        columns += ["seconds,_%", "died"]
        if target is not None:
            columns.append(f"labels_to_{target}_%")
        body = []
        for row in ordered:
            line: list[Any] = [row["strategy"], row["seeds"]]
            line += [_cell(point) for point in row["budgets"]]
            if row["strategy"] == baseline:  # nothing is compared with itself
                line += ["-", "-", "-"]
            else:
                line.append(_percent(row.get("area_percent"), row.get("area_error")))
                line.append(f"{row['wins']}/{row['seeds']}" if "wins" in row else "-")
                seconds = row.get("seconds_percent"), row.get("seconds_error")
                line.append(_percent(*seconds, digits=0))
            line.append(f"{row['budgets'][0]['died']:.1f}")
            if target is not None:
                needed = labels_to(row, target)
                line.append("-" if needed is None else f"{needed:.0f}")
            body.append(line)
        print_table(f"learner {learner}: MAPE in % after so many labels", columns, body)
    console().print(
        f"In brackets: difference to {baseline} on the same splits and its standard error. area: "
        f"under the curve over the logarithm of labels, against {baseline}. wins: splits on "
        "which the area is less. seconds: of steps measured, to the same error; its standard error "
        "by jackknife. Errors count that splits overlap. died: of the first labels, "
        "runs that died."
    )


def _cell(point: BudgetRow) -> str:
    text = f"{point['mape']:.2f}"
    if point.get("difference"):
        error = point["difference_error"]
        text += f" ({point['difference']:+.2f}" + (")" if error is None else f"±{error:.2f})")
    return text


def _percent(value: float | None, error: float | None, *, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:+.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def half_band(row: StrategyRow) -> Array:
    """Half the width of the band at each budget: Student's t, since seeds may be few. One alone
    has no band."""
    if row["seeds"] == 1:
        return np.zeros(len(row["budgets"]))
    from scipy.stats import t  # type: ignore[import-untyped]

    errors = np.array([point["error"] for point in row["budgets"]])
    half: Array = t.ppf((1 + BAND) / 2, row["seeds"] - 1) * errors
    return half


def draw(rows: Sequence[StrategyRow], path: Path, title: str, baseline: str = BASELINE) -> None:
    """Error against labels and, where labels are times, seconds, with bands of 95 % (PNG).

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    timed = all(p["seconds"] is not None for row in rows for p in row["budgets"])
    figure = new_figure(12 if timed else 7, 5)
    keys = ("labels", "seconds") if timed else ("labels",)
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        for row in rows:
            places = [p["labels"] if key == "labels" else p["seconds"] for p in row["budgets"]]
            middle = np.array([p["mape"] for p in row["budgets"]])
            half = half_band(row)
            bold = row["strategy"] in {"ours", baseline}
            (line,) = axes.plot(
                places,
                middle,
                label=f"{row['strategy']} ({row['learner']})",
                linewidth=2.2 if bold else 1.0,
                color="black" if row["strategy"] == baseline else None,
            )
            axes.fill_between(
                places, middle - half, middle + half, color=line.get_color(), alpha=0.12
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):  # numbers instead of powers of ten
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("labels" if key == "labels" else "measured seconds of steps")
        axes.grid(visible=True, which="both", alpha=0.2)
    figure.axes[0].set_ylabel("MAPE on held-out architectures, %")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(title)
    save_png(figure, path, dpi=130)
