"""`python -m research tune`: settings of a predictor, by cross-validation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from research.options import GraphProcesses, MetricName
from trappm.cli.options import AsJson, print_json
from trappm.profiler.number_text import number_text

MAX_TRIALS = 10_000


def tune(
    labels: Annotated[Path, typer.Option(help="Labels: an export, or a published sheet.")],
    estimator: Annotated[
        str, typer.Option(help="By name; those that have settings.")
    ] = "trappm-laptop",
    metric: MetricName = "memory",
    trials: Annotated[
        int, typer.Option(min=1, max=MAX_TRIALS, help="In all; a study goes on until it has them.")
    ] = 30,
    study: Annotated[
        str | None, typer.Option(help="Its name; by default estimator and metric.")
    ] = None,
    processes: GraphProcesses = None,
    as_json: AsJson = False,
) -> None:
    """Search for better settings, beginning with those that are shipped.

    The study is kept in the label store's database: stopped or killed, the same command goes on.
    """
    from research.evaluation.label_files import metric_column
    from research.evaluation.tables import EvaluationDisplay
    from research.tuning.study import tune as run_study
    from research.tuning.tuning import space_of

    space_of(estimator)  # before anything dear
    column = metric_column(metric)
    with EvaluationDisplay() as display:
        try:
            report = run_study(
                labels,
                estimator=estimator,
                metric=column,
                trials=trials,
                study=study or f"{estimator} {column}",
                processes=processes or len(os.sched_getaffinity(0)),
                watch=display.show,
            )
        except KeyboardInterrupt as interrupt:
            typer.echo("trappm: interrupted; the same command goes on", err=True)
            raise typer.Exit(130) from interrupt
    if as_json:
        print_json(report)
    else:
        _print_study(report)


def _print_study(report: Mapping[str, Any]) -> None:
    from trappm.terminal.tables import console, print_table

    counts = report["trials"]
    console().print(
        f"study {report['study']}: {counts['complete']} trials completed, {counts['pruned']} given "
        f"up early, {counts['fail']} failed",
        markup=False,
    )
    rows = [
        (which, trial["trial"], trial["mape"],
         ", ".join(f"{k} {number_text(v)}" for k, v in trial["settings"].items()))
        for which, trial in (("shipped", report["shipped"]), ("best", report["best"]))
        if trial
    ]  # fmt: skip
    print_table("", ("which", "trial", "MAPE_%", "settings"), rows)
