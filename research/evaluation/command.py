"""`python -m research evaluate`: errors of our predictors and of published ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from research.evaluation.benchmark import PAPER_SEEDS, SplitKind
from research.evaluation.evaluation import Request, evaluate_files, evaluate_splits
from research.evaluation.label_files import metric_column, read_usable
from research.evaluation.plots import check_plots, draw
from research.evaluation.tables import EvaluationDisplay, print_evaluation
from research.options import GraphProcesses, MetricName, Usable
from research.peers.graph_networks import SIZES
from research.peers.predictors import check_names
from trappm.cli.options import AsJson, print_json
from trappm.profiler.errors import InputError

MAX_SEEDS = 20
MAX_COUNTS = 10


def evaluate(
    suite: Annotated[
        Literal["paper"] | None, typer.Option(help="paper: all splits, the honest ones first.")
    ] = None,
    train: Annotated[Path | None, typer.Option(help="Labels to learn from.")] = None,
    test: Annotated[Path | None, typer.Option(help="Labels to judge by.")] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Labels to divide: an export, or a published sheet.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Divide this device's labels in the label store instead.")
    ] = None,
    metric: MetricName = "memory",
    estimator: Annotated[
        list[str] | None,
        typer.Option(help="Name; may be repeated (default: all, or ours with --train)."),
    ] = None,
    split: Annotated[
        list[SplitKind] | None, typer.Option(help="Kind of split; may be repeated.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=MAX_SEEDS, help="Number of seeds, from 1337 on.")
    ] = 5,
    label_counts: Annotated[
        str | None, typer.Option(help="Numbers of labels to learn from as well, such as 20,50,100.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="Labels of another device: also start from its models.")
    ] = None,
    usable: Usable = None,
    size: Annotated[str, typer.Option(help="Baselines' networks: laptop or paper.")] = "laptop",
    runs: Annotated[
        Path | None, typer.Option(help="Folder that keeps every run; a repeated call continues.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to write plots to.")] = None,
    processes: GraphProcesses = None,
    as_json: AsJson = False,
) -> None:
    """Train predictors on labels and judge them on others that they have not seen.

    With --train and --test on two files, else on splits of one set of labels. Graphs are made
    where they are missing, which takes a second or more for each architecture, and kept.
    """
    files = train is not None or test is not None
    if files and (train is None or test is None):
        raise InputError("--train and --test belong together; give both files")
    if files and any((suite, labels, device, split, label_counts, plots, runs)):
        raise InputError("--train and --test judge two files; they take no splits, runs or plots")
    if not files and (labels is None) == (device is None):
        raise InputError("give labels: a file with --labels, or a device of the store (--device)")
    if size not in SIZES:
        raise InputError(f"Unknown size {size!r}. Expected one of: {', '.join(SIZES)}")
    check_names(estimator or ())
    if plots is not None:
        check_plots(plots)
    chosen = estimator or (["ours"] if files else None)
    display = EvaluationDisplay()
    request = Request(
        metric=metric_column(metric),
        estimators=None if chosen is None else list(dict.fromkeys(chosen)),
        size=size,
        seeds=tuple(PAPER_SEEDS[0] + i for i in range(seeds)),
        label_counts=_counts(label_counts),
        usable=None if usable is None else read_usable(usable),
        start=start,
        runs=runs,
        processes=processes or len(os.sched_getaffinity(0)),
        watch=display.show,
    )
    _make_folder(runs)
    with display:
        if train is not None and test is not None:
            result = evaluate_files(request, train, test)
        else:
            wanted = split or (list(SplitKind) if suite else [SplitKind.ARCHITECTURES])
            kinds = [kind for kind in SplitKind if kind in wanted]
            result = evaluate_splits(request, kinds, labels=labels, device=device)
    for path in draw(result, plots) if plots is not None else ():
        typer.echo(f"drawn: {path}", err=True)
    if as_json:
        print_json(result.report)
    else:
        print_evaluation(result.report)


def _make_folder(folder: Path | None) -> None:
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--runs {folder} is no folder to write: {error.strerror}") from error


def _counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise InputError(f"--label-counts is {text!r}; give numbers such as 20,50,100") from error
    if counts[0] < 0 or len(counts) > MAX_COUNTS:
        raise InputError(f"--label-counts is {text!r}; give at most {MAX_COUNTS}, none below 0")
    return tuple(counts)
