"""`python -m research replay`: which strategy needs the fewest labels, on labels that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trappm.cli.options import AsJson, MetricName, Usable, print_json
from trappm.profiler.errors import InputError

MAX_SEEDS = 200
FIRST_SEED = 1337


Labels = Annotated[Path, typer.Option(help="Recorded labels: an export, or a published sheet.")]
Strategies = Annotated[str, typer.Option(help="Names with commas between them, or all.")]
Baseline = Annotated[str, typer.Option(help="The strategy that the others are compared with.")]
Learners = Annotated[
    str,
    typer.Option(
        help="Names with commas: quick (one Gaussian process over the physical prior), or "
        "estimators of `python -m research evaluate` such as ours, trappm-laptop, nnlqp."
    ),
]
Kept = Annotated[
    Path, typer.Option(help="Where campaigns are kept as they end; a second run goes on there.")
]


def replay(
    labels: Labels,
    strategy: Strategies = "random,ours",
    baseline: Baseline = "random",
    learner: Learners = "quick",
    metric: MetricName = "memory",
    budget: Annotated[int, typer.Option(min=2, help="Labels of each campaign.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, max=MAX_SEEDS, help="How many splits.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="They count up from this.")] = FIRST_SEED,
    usable: Usable = None,
    results: Kept = Path("replay.jsonl"),
    processes: Annotated[int, typer.Option(min=1, max=256, help="Campaigns at once.")] = 1,
    png: Annotated[Path | None, typer.Option(help="Draw the curves into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run whole campaigns against recorded labels, and compare strategies on the same splits.

    Whole architectures are held out of every campaign, and errors are those on them.
    """
    from research.evaluation.label_files import metric_column
    from research.evaluation.tables import EvaluationDisplay
    from research.replay.replay import BUDGETS
    from research.replay.replays import Plan, Results, run
    from research.replay.tables import draw, print_summary, summary

    plan = Plan(
        labels=labels,
        metric=metric_column(metric),
        strategies=_strategies(strategy, baseline),
        learners=_learners(learner),
        seeds=range(first_seed, first_seed + seeds),
        budgets=[*(b for b in BUDGETS if b < budget), budget],
        usable=usable,
    )
    _check_files(labels, usable, png)
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


def _strategies(text: str, baseline: str) -> list[str]:
    """Raises InputError: a strategy that there is not, or a baseline that is not among them."""
    from research.replay.strategies import JUDGED, named_strategy
    from trappm.learner.acquisition import STRATEGIES

    everyone = [*STRATEGIES, *(other.name for other in JUDGED)]
    strategies = everyone if text == "all" else _names(text)
    for name in strategies:
        named_strategy(name)
    if baseline not in strategies:
        raise InputError(
            f"the baseline {baseline!r} is not replayed; add it to --strategy, "
            f"or give one of these with --baseline: {', '.join(strategies)}"
        )
    return strategies


def _learners(text: str) -> list[str]:
    """Raises InputError: one that there is not."""
    from research.peers.predictors import check_names
    from research.replay.replays import QUICK

    learners = _names(text)
    check_names([name for name in learners if name != QUICK])
    return learners


def _check_files(labels: Path, usable: Path | None, png: Path | None) -> None:
    """Raises InputError: a file that is not there, or nothing to draw with."""
    from trappm.terminal.plots import require_matplotlib

    if png is not None:
        require_matplotlib("--png")
    for path in (labels, usable):
        if path is not None and not path.is_file():
            raise InputError(f"there is no file {path}")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("no name is given; give names with commas between them")
    return list(dict.fromkeys(names))
