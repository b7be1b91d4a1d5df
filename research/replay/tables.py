"""Results of replayed campaigns: tables, and plots of error against labels and seconds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from research.evaluation.benchmark import TEST_SHARE
from research.replay.replay import Point
from research.replay.replays import Plan, Results
from trappm.terminal.plots import new_figure, save_png
from trappm.terminal.tables import console, print_table

Array = npt.NDArray[np.float64]
Row = dict[str, Any]
"""Results of a strategy with a learner."""
Campaigns = Sequence[Sequence[Point]]

BASELINE = "random"
PAPER = {"memory_mib": 4.92, "step_time_ms": 9.51, "power_w": 5.01}
"""Errors (MAPE, percent) of the TraPPM paper, Table III: labels are counted until these."""
BAND = 0.95
"""Confidence of the band around a curve."""
OVERLAP = TEST_SHARE / (1 - TEST_SHARE)
"""Judged labels per learned label of a split."""


def summary(results: Results, plan: Plan, baseline: str = BASELINE) -> list[Row]:
    """Return the results of each learner and strategy over the seeds that the baseline has as well.

    Returns:
        Rows with `learner`, `strategy` and `seeds`; by budget `mape` with its standard error, the
        `difference` to the baseline on the same seeds with its standard error, `median_ape`,
        `seconds`, and labels that ran out of memory (`died`). If the baseline was run: the area
        under the curve over the logarithm of labels, and the seconds to the same error, both
        against the baseline in percent with a standard error; the number of seeds with less area.
    """
    rows = []
    for learner, strategy in itertools.product(plan.learners, plan.strategies):
        own, base = (
            {
                job.seed: points
                for job, points in results.points.items()
                if job.seed in plan.seeds and (job.learner, job.strategy) == (learner, name)
            }
            for name in (strategy, baseline)
        )
        seeds = sorted(own.keys() & base.keys()) if base else sorted(own)
        if seeds:
            campaigns = [own[s] for s in seeds], [base[s] for s in seeds] if base else []
            row = {"learner": learner, "strategy": strategy, "seeds": len(seeds)}
            rows.append(row | _compared(*campaigns, plan.budgets))
    return rows


def _compared(own: Campaigns, base: Campaigns, budgets: Sequence[int]) -> Row:
    errors = _columns(own, "mape")
    seconds = _columns(own, "seconds")
    row: Row = {
        "budgets": [
            {
                "labels": labels,
                "mape": float(errors[:, i].mean()),
                "error": standard_error(errors[:, i]),
                "median_ape": float(_columns(own, "median_ape")[:, i].mean()),
                "died": float(_columns(own, "died")[:, i].mean()),
                "seconds": None if np.isnan(seconds[:, i]).any() else float(seconds[:, i].mean()),
            }
            for i, labels in enumerate(budgets)
        ]
    }
    if not base:
        return row
    drawn = _columns(base, "mape")
    for point, gaps in zip(row["budgets"], (errors - drawn).T, strict=True):
        point |= {"difference": float(gaps.mean()), "difference_error": standard_error(gaps)}
    percent = 100 * (area(np.log(budgets), errors) / area(np.log(budgets), drawn) - 1.0)
    return row | {
        "area_percent": float(percent.mean()),
        "area_error": standard_error(percent),
        "wins": int((percent < 0).sum()),
        "seconds_percent": seconds_to_same_error(own, base),
        "seconds_error": jackknife_error(own, base),
    }


def _columns(campaigns: Campaigns, name: str) -> Array:
    """Return a field of all points, shape (campaigns, budgets); NaN where it is missing."""
    return np.array([[getattr(p, name) for p in points] for points in campaigns], dtype=float)


def area(places: Array, values: Array) -> Array:
    """Return the mean of each row of values (k, m) over places (m,) by trapezoids, shape (k,)."""
    if len(places) == 1:
        return np.array(values[:, 0])
    areas: Array = np.trapezoid(values, places) / (places[-1] - places[0])
    return areas


def standard_error(values: Array) -> float | None:
    """Return the standard error of the mean over splits of one sheet; None of a single value.

    The splits share most of what they train and judge on, so the mean scatters more than that of
    independent ones would (Nadeau and Bengio, Machine Learning 52, 2003, section 3).
    """
    n = len(values)
    return float(np.std(values, ddof=1) * np.sqrt(1 / n + OVERLAP)) if n > 1 else None


def seconds_to_same_error(own: Campaigns, base: Campaigns) -> float | None:
    """Return the mean difference, in percent, of the seconds to reach the baseline's errors.

    Both curves are means over seeds, made to fall, and compared in the logarithm of seconds at
    errors that both reach; None if there are no such errors or no seconds.
    """
    seconds = [np.log(_columns(many, "seconds").mean(axis=0)) for many in (own, base)]
    errors = [np.minimum.accumulate(_columns(many, "mape").mean(axis=0)) for many in (own, base)]
    low, high = max(e[-1] for e in errors), min(e[0] for e in errors)
    if low >= high or not np.isfinite(seconds).all():
        return None
    levels = np.linspace(low, high, 50)
    ours, theirs = (
        np.interp(levels, e[::-1], s[::-1]) for e, s in zip(errors, seconds, strict=True)
    )
    return 100 * float(np.expm1((ours - theirs).mean()))


def jackknife_error(own: Campaigns, base: Campaigns) -> float | None:
    """Return the standard error of `seconds_to_same_error` by leaving out each split.

    None where one of the values without a split is not known.
    """
    n = len(own)
    without = [
        seconds_to_same_error([*own[:i], *own[i + 1 :]], [*base[:i], *base[i + 1 :]])
        for i in range(n if n > 1 else 0)
    ]
    known = np.array([value for value in without if value is not None])
    if len(known) < max(n, 2):
        return None
    return float(np.sqrt((n - 1) * known.var() * (1 + n * OVERLAP)))


def labels_to(row: Row, target: float) -> float | None:
    """Return the number of labels at which the mean error first falls to the target.

    It is interpolated between budgets in the logarithm; None if the error stays above the target,
    and the first budget if it starts below.
    """
    labels = [float(point["labels"]) for point in row["budgets"]]
    errors = np.array([point["mape"] for point in row["budgets"]])
    if errors.min() > target:
        return None
    first = int(np.argmax(errors <= target))
    if first == 0:
        return labels[0]
    at = slice(first - 1, first + 1)
    return float(np.exp(np.interp(-target, -errors[at], np.log(labels[at]))))


def print_summary(rows: Sequence[Row], metric: str, baseline: str = BASELINE) -> None:
    """Print one table per learner, best strategy first."""
    target = PAPER.get(metric)
    for learner, group in itertools.groupby(rows, key=lambda row: str(row["learner"])):
        ordered = sorted(group, key=lambda row: float(row.get("area_percent", 0.0)))
        budgets = [str(point["labels"]) for point in ordered[0]["budgets"]]
        columns = ["strategy", "seeds", *budgets, "area,_%", "wins", "seconds,_%", "died"]
        body = []
        for row in ordered:
            line: list[Any] = [row["strategy"], row["seeds"], *map(_cell, row["budgets"])]
            if row["strategy"] == baseline or "wins" not in row:
                line += ["-", "-", "-"]
            else:
                line.append(_percent(row["area_percent"], row["area_error"], 1))
                line.append(f"{row['wins']}/{row['seeds']}")
                line.append(_percent(row["seconds_percent"], row["seconds_error"], 0))
            line.append(f"{row['budgets'][0]['died']:.1f}")
            if target is not None:
                needed = labels_to(row, target)
                line.append("-" if needed is None else f"{needed:.0f}")
            body.append(line)
        if target is not None:
            columns.append(f"labels_to_{target}_%")
        print_table(f"learner {learner}: MAPE in % by number of labels", columns, body)
    console().print(
        f"In brackets: difference to {baseline} on the same splits and its standard error. area: "
        f"under the curve over the logarithm of labels, against {baseline}. wins: splits with less "
        "area. seconds: of measured steps, to the same error, with a standard error by jackknife. "
        "Errors count that splits overlap. died: first labels that ran out of memory."
    )


def _cell(point: Mapping[str, Any]) -> str:
    text = f"{point['mape']:.2f}"
    if not point.get("difference"):
        return text
    error = point["difference_error"]
    return f"{text} ({point['difference']:+.2f}" + (")" if error is None else f"±{error:.2f})")


def _percent(value: float | None, error: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:+.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def half_band(row: Row) -> Array:
    """Return half the width of the band at each budget, by Student's t; 0 of one seed."""
    if row["seeds"] == 1:
        return np.zeros(len(row["budgets"]))
    from scipy.stats import t  # type: ignore[import-untyped]

    errors = np.array([point["error"] for point in row["budgets"]])
    half: Array = t.ppf((1 + BAND) / 2, row["seeds"] - 1) * errors
    return half


def draw(rows: Sequence[Row], path: Path, title: str, baseline: str = BASELINE) -> None:
    """Draw error against labels and, where labels are times, seconds, with bands of 95 % (PNG).

    Raises:
        InputError: The file cannot be written.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    timed = all(p["seconds"] is not None for row in rows for p in row["budgets"])
    names = {"labels": "labels"} | ({"seconds": "measured seconds of steps"} if timed else {})
    figure = new_figure(12 if timed else 7, 5)
    for axes, key in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for row in rows:
            places = [p[key] for p in row["budgets"]]
            middle, half = np.array([p["mape"] for p in row["budgets"]]), half_band(row)
            (line,) = axes.plot(
                places,
                middle,
                label=f"{row['strategy']} ({row['learner']})",
                linewidth=2.2 if row["strategy"] in {"ours", baseline} else 1.0,
                color="black" if row["strategy"] == baseline else None,
            )
            color = line.get_color()
            axes.fill_between(places, middle - half, middle + half, color=color, alpha=0.12)
        axes.set(xscale="log", yscale="log", xlabel=names[key])
        for axis in (axes.xaxis, axes.yaxis):  # numbers instead of powers of ten
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.grid(visible=True, which="both", alpha=0.2)
    figure.axes[0].set_ylabel("MAPE on held-out architectures, %")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(title)
    save_png(figure, path, dpi=130)
