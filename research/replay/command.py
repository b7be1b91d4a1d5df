"""`python -m research replay`: comparison of acquisition strategies on recorded labels.

Every learner is replayed with every strategy and seed. Each process prepares its own labels from
the profiles in the store, so that no large data is sent between processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import joblib  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import typer

from research.evaluation.benchmark import TEST_SHARE
from research.evaluation.command import MetricName, Usable
from research.evaluation.label_files import metric_column, read_labels, read_usable
from research.evaluation.workbench import Workbench, show_progress
from research.peers.predictors import check_names
from research.replay.replay import (
    BUDGETS,
    JUDGED,
    Bench,
    ReplayPoint,
    check_installed,
    named_strategy,
)
from research.replay.replay import replay as replayed
from trappm.cli.options import AsJson, print_json
from trappm.learner.acquisition import STRATEGIES
from trappm.learner.paper.presets import LAPTOP
from trappm.profiler.devices.catalogue import known_spec
from trappm.profiler.errors import InputError, TrappmError
from trappm.profiler.records import Watch
from trappm.terminal.plots import curves
from trappm.terminal.tables import console, print_table

Array = npt.NDArray[np.float64]
Row = dict[str, Any]
"""Results of a strategy with a learner."""
Campaigns = Sequence[Sequence[ReplayPoint]]

MAX_SEEDS = 200
FIRST_SEED = 1337
BASELINE = "random"
PAPER = {"memory_mib": 4.92, "step_time_ms": 9.51, "power_w": 5.01}
"""Target errors (MAPE in percent) from Table III of the TraPPM paper."""
OVERLAP = TEST_SHARE / (1 - TEST_SHARE)
"""Ratio of test labels to training labels in a split."""


def replay(
    labels: Annotated[Path, typer.Option(help="Labels: an export, or a published sheet.")],
    strategy: Annotated[
        str, typer.Option(help="Names with commas between them, or all.")
    ] = "random,ours",
    baseline: Annotated[str, typer.Option(help="Strategy to compare the others with.")] = "random",
    learner: Annotated[
        str,
        typer.Option(
            help="Names with commas: estimators of `python -m research evaluate`, such as ours, "
            "prior (fast), trappm-laptop, nnlqp."
        ),
    ] = "ours",
    metric: MetricName = "memory",
    budget: Annotated[int, typer.Option(min=2, help="Labels of each campaign.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, max=MAX_SEEDS, help="Number of splits.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = FIRST_SEED,
    usable: Usable = None,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Campaigns at once.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Run whole campaigns on recorded labels, and compare strategies on the same splits.

    Every campaign holds out whole architectures to evaluate errors.
    """
    everyone = [*STRATEGIES, *(other.name for other in JUDGED)]
    strategies = everyone if strategy == "all" else _names(strategy)
    for name in strategies:
        named_strategy(name)
    if baseline not in strategies:
        raise InputError(
            f"the baseline {baseline!r} is not replayed; add it to --strategy, "
            f"or give one of these with --baseline: {', '.join(strategies)}"
        )
    learners = _names(learner)
    check_names(learners)
    for path in (labels, usable):
        if path is not None and not path.is_file():
            raise InputError(f"{path} does not exist")
    plan = ReplayPlan(
        labels=labels,
        metric=metric_column(metric),
        strategies=strategies,
        learners=learners,
        seeds=range(first_seed, first_seed + seeds),
        budgets=[*(b for b in BUDGETS if b < budget), budget],
        usable=usable,
    )
    points = run(plan, processes=processes, watch=show_progress)
    rows = summary(points, plan, baseline)
    if as_json:
        about = {"metric": plan.metric, "labels": labels.name, "baseline": baseline}
        print_json({**about, "results": rows})
    else:
        print_summary(rows, plan.metric, baseline)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("no name was given; separate names with commas")
    return list(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """Campaigns to run: every learner with every strategy and seed."""

    labels: Path
    metric: str
    """Column of the metric, such as `memory_mib`."""
    strategies: Sequence[str]
    learners: Sequence[str] = ("ours",)
    seeds: Sequence[int]
    budgets: Sequence[int]
    usable: Path | None = None


@dataclass(frozen=True, order=True)
class Job:
    """One campaign to replay: learner, strategy and seed."""

    seed: int
    learner: str
    strategy: str


def run(plan: ReplayPlan, *, processes: int, watch: Watch) -> dict[Job, list[ReplayPoint]]:
    """Run all campaigns and return their points.

    Raises:
        InputError: The labels cannot be read, or a learner or strategy lacks an input.
        TrappmError: A process ended unexpectedly.
    """
    check_installed(plan.strategies)
    jobs = list(
        itertools.starmap(Job, itertools.product(plan.seeds, plan.learners, plan.strategies))
    )
    watch(0, len(jobs), "preparing")
    results = {}
    for done, (job, points) in enumerate(_played(plan, jobs, processes, watch), start=1):
        results[job] = points
        watch(done, len(jobs), f"{job.learner}, {job.strategy}, seed {job.seed}")
    return results


def _played(
    plan: ReplayPlan, jobs: Sequence[Job], processes: int, watch: Watch
) -> Iterator[tuple[Job, list[ReplayPoint]]]:
    benches = Benches(plan, watch)  # makes missing profiles once
    if processes == 1:
        yield from ((job, benches.play(job)) for job in jobs)
        return
    with joblib.parallel_config("loky", inner_max_num_threads=1):
        workers = joblib.Parallel(min(processes, len(jobs)), return_as="generator_unordered")
        try:
            yield from workers(joblib.delayed(_play)(plan, job) for job in jobs)
        except BrokenProcessPool as error:
            raise TrappmError("a process ended; use fewer with --processes") from error


def _play(plan: ReplayPlan, job: Job) -> tuple[Job, list[ReplayPoint]]:
    if not _BENCHES or _BENCHES[0].plan != plan:
        _BENCHES[:] = [Benches(plan)]
    return job, _BENCHES[0].play(job)


_BENCHES: list[Benches] = []
"""Workbenches of a worker process for its last plan."""


class Benches:
    """Labels of a plan, and a workbench for each learner."""

    def __init__(self, plan: ReplayPlan, watch: Watch = lambda done, total, what: None) -> None:
        self.plan = plan
        workbench = Workbench(
            metric=plan.metric,
            processes=1,
            usable=None if plan.usable is None else read_usable(plan.usable),
            watch=watch,
        )
        prepared = workbench.prepared(read_labels(plan.labels))
        # The acquisitions of every learner use a campaign's default embeddings.
        encoder = workbench.encoder(prepared.samples, LAPTOP.encoder, pretrained=True)
        embeddings = encoder.embed([w.graph for w in prepared.samples.workloads])
        self._benches = {
            learner: Bench(
                samples=prepared.samples,
                embeddings=embeddings,
                metric=plan.metric,
                spec=known_spec(prepared.card),
                estimator=workbench.estimator(learner, prepared),
            )
            for learner in plan.learners
        }

    def play(self, job: Job) -> list[ReplayPoint]:
        bench = self._benches[job.learner]
        return list(replayed(bench, job.strategy, job.seed, self.plan.budgets))


def summary(
    results: Mapping[Job, Sequence[ReplayPoint]], plan: ReplayPlan, baseline: str = BASELINE
) -> list[Row]:
    """Return the results of each learner and strategy over the seeds shared with the baseline.

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
                for job, points in results.items()
                if job.seed in plan.seeds and (job.learner, job.strategy) == (learner, name)
            }
            for name in (strategy, baseline)
        )
        seeds = sorted(own.keys() & base.keys()) if base else sorted(own)
        if seeds:
            campaigns = [own[s] for s in seeds], [base[s] for s in seeds] if base else []
            row = {"learner": learner, "strategy": strategy, "seeds": len(seeds)}
            rows.append(row | _compare(*campaigns, plan.budgets))
    return rows


def _compare(own: Campaigns, base: Campaigns, budgets: Sequence[int]) -> Row:
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
    """Print one table per learner, best strategy first, and a plot of all errors by labels."""
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
    lines = {
        f"{row['learner']}, {row['strategy']}": [(p["labels"], p["mape"]) for p in row["budgets"]]
        for row in rows
    }
    if len(rows[0]["budgets"]) > 1:
        title = f"{metric}: error on architectures held out"
        plot = curves(lines, title=title, x_label="number of labels", y_label="MAPE, %")
        console().out(plot, highlight=False)


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
