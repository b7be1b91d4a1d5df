"""`python -m research replay`: the labels that strategies need, on recorded labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from research.evaluation.label_files import metric_column
from research.evaluation.tables import EvaluationDisplay
from research.options import MetricName, Usable
from research.peers.predictors import check_names
from research.replay.replay import BUDGETS
from research.replay.replays import QUICK, Plan, Results, run
from research.replay.strategies import JUDGED, named_strategy
from research.replay.tables import draw, print_summary, summary
from trappm.cli.options import AsJson, print_json
from trappm.learner.acquisition import STRATEGIES
from trappm.profiler.errors import InputError
from trappm.terminal.plots import require_matplotlib

MAX_SEEDS = 200
FIRST_SEED = 1337


def replay(
    labels: Annotated[Path, typer.Option(help="Labels: an export, or a published sheet.")],
    strategy: Annotated[
        str, typer.Option(help="Names with commas between them, or all.")
    ] = "random,ours",
    baseline: Annotated[
        str, typer.Option(help="Strategy that the others are compared with.")
    ] = "random",
    learner: Annotated[
        str,
        typer.Option(
            help="Names with commas: quick (one Gaussian process over the physical prior), or "
            "estimators of `python -m research evaluate` such as ours, trappm-laptop, nnlqp."
        ),
    ] = "quick",
    metric: MetricName = "memory",
    budget: Annotated[int, typer.Option(min=2, help="Labels of each campaign.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, max=MAX_SEEDS, help="Number of splits.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = FIRST_SEED,
    usable: Usable = None,
    results: Annotated[
        Path, typer.Option(help="File that keeps finished campaigns; a repeated call continues.")
    ] = Path("replay.jsonl"),
    processes: Annotated[int, typer.Option(min=1, max=256, help="Campaigns at once.")] = 1,
    png: Annotated[Path | None, typer.Option(help="Draw the curves into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run whole campaigns against recorded labels, and compare strategies on the same splits.

    Whole architectures are held out of every campaign, and errors are those on them.
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
    check_names([name for name in learners if name != QUICK])
    if png is not None:
        require_matplotlib("--png")
    for path in (labels, usable):
        if path is not None and not path.is_file():
            raise InputError(f"there is no file {path}")
    plan = Plan(
        labels=labels,
        metric=metric_column(metric),
        strategies=strategies,
        learners=learners,
        seeds=range(first_seed, first_seed + seeds),
        budgets=[*(b for b in BUDGETS if b < budget), budget],
        usable=usable,
    )
    kept = Results.read(results, plan.identity)
    with EvaluationDisplay() as display:
        run(plan, kept, processes=processes, watch=display.show)
    rows = summary(kept, plan, baseline)
    if png is not None:
        draw(rows, png, f"{plan.metric}, {labels.stem}, {seeds} splits", baseline)
    if as_json:
        about = {"metric": plan.metric, "labels": labels.name, "baseline": baseline}
        print_json({**about, "results": rows})
    else:
        print_summary(rows, plan.metric, baseline)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("no name is given; give names with commas between them")
    return list(dict.fromkeys(names))
