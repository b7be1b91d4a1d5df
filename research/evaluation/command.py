"""`python -m research evaluate`: errors of our predictors and of published ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from research.options import GraphProcesses, MetricName, Usable
from trappm.cli.options import AsJson, print_json
from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    from research.evaluation.benchmark import SplitKind
    from research.evaluation.evaluation import Evaluation, Request

MAX_SEEDS = 20
MAX_COUNTS = 10


Suite = Annotated[str | None, typer.Option(help="paper: all splits, the honest ones first.")]
Labels = Annotated[
    Path | None, typer.Option(help="Labels to divide: an export, or a published sheet.")
]
Device = Annotated[
    str | None, typer.Option(help="Divide this device's labels in the label store instead.")
]
Estimators = Annotated[
    list[str] | None,
    typer.Option(help="By name; again for more. All by default, ours alone with --train."),
]
Splits = Annotated[
    list[str] | None,
    typer.Option(help="architectures, families, each-family, configurations; again for more."),
]
LabelCounts = Annotated[
    str | None, typer.Option(help="Also learn from so many labels, such as 20,50,100.")
]
Start = Annotated[
    Path | None, typer.Option(help="Labels of another device: also start from its models.")
]
Size = Annotated[str, typer.Option(help="Of the baselines' networks: laptop, paper.")]
Runs = Annotated[
    Path | None,
    typer.Option(help="Keep every run in this folder: the same command goes on behind it."),
]


def evaluate(
    suite: Suite = None,
    train: Annotated[Path | None, typer.Option(help="Labels to learn from.")] = None,
    test: Annotated[Path | None, typer.Option(help="Labels to judge by.")] = None,
    labels: Labels = None,
    device: Device = None,
    metric: MetricName = "memory",
    estimator: Estimators = None,
    split: Splits = None,
    seeds: Annotated[int, typer.Option(min=1, max=MAX_SEEDS, help="How many, from 1337 on.")] = 5,
    label_counts: LabelCounts = None,
    start: Start = None,
    usable: Usable = None,
    size: Size = "laptop",
    runs: Runs = None,
    plots: Annotated[Path | None, typer.Option(help="Write plots into this folder.")] = None,
    processes: GraphProcesses = None,
    as_json: AsJson = False,
) -> None:
    """Train predictors on labels and judge them on others that they have not seen.

    With --train and --test on two files, else on splits of one set of labels. Graphs are made
    where they are missing, which takes a second or more for each architecture, and kept.
    """
    splits_only = (suite, labels, device, split, label_counts, plots, runs)
    files = _two_files(train, test, any(splits_only))
    if files is None and (labels is None) == (device is None):
        raise InputError("give labels: a file with --labels, or a device of the store (--device)")
    _check("suite", suite, ("paper",))
    counts = _counts(label_counts)
    _check_choices(size, split, estimator, plots)

    from research.evaluation.benchmark import PAPER_SEEDS
    from research.evaluation.evaluation import Request
    from research.evaluation.label_files import metric_column, read_usable
    from research.evaluation.tables import EvaluationDisplay

    chosen = estimator or (["ours"] if files else None)
    display = EvaluationDisplay()
    request = Request(
        metric=metric_column(metric),
        estimators=None if chosen is None else list(dict.fromkeys(chosen)),
        size=size,
        seeds=tuple(PAPER_SEEDS[0] + i for i in range(seeds)),
        label_counts=counts,
        usable=None if usable is None else read_usable(usable),
        start=start,
        runs=runs,
        processes=processes or len(os.sched_getaffinity(0)),
        watch=display.show,
    )
    _make_folder("--runs", runs)
    with display:
        result = _evaluated(request, files, _split_kinds(split, suite), labels, device)
    _show(result, plots, as_json)


def _evaluated(
    request: Request,
    files: tuple[Path, Path] | None,
    kinds: Sequence[SplitKind],
    labels: Path | None,
    device: str | None,
) -> Evaluation:
    from research.evaluation.evaluation import evaluate_files, evaluate_splits

    if files is not None:
        return evaluate_files(request, *files)
    return evaluate_splits(request, kinds, labels=labels, device=device)


def _two_files(train: Path | None, test: Path | None, splits: bool) -> tuple[Path, Path] | None:
    """Labels to learn from and to judge by; None where one set of labels is to be divided.

    Raises:
        InputError: one without the other, or beside an option that is for splits.
    """
    if train is None and test is None:
        return None
    if train is None or test is None:
        raise InputError("--train and --test belong together; give both files")
    if splits:
        raise InputError("--train and --test judge two files; they take no splits, runs or plots")
    return train, test


def _check_choices(
    size: str, splits: Sequence[str] | None, estimators: Sequence[str] | None, plots: Path | None
) -> None:
    """Raises InputError: a size, split or estimator that there is not, or no place for plots."""
    from research.evaluation.benchmark import SplitKind
    from research.peers.predictors import check_names
    from research.peers.sizes import SIZES

    _check("size", size, tuple(SIZES))
    for name in splits or ():
        _check("split", name, tuple(map(str, SplitKind)))
    check_names(estimators or ())
    if plots is not None:
        from research.evaluation.plots import check_plots

        check_plots(plots)


def _split_kinds(splits: Sequence[str] | None, suite: str | None) -> list[SplitKind]:
    from research.evaluation.benchmark import SplitKind

    wanted = splits or (list(SplitKind) if suite else [SplitKind.ARCHITECTURES])
    return [kind for kind in SplitKind if kind in wanted]


def _show(result: Evaluation, plots: Path | None, as_json: bool) -> None:
    if plots is not None:
        from research.evaluation.plots import draw

        for path in draw(result, plots):
            typer.echo(f"drawn: {path}", err=True)
    if as_json:
        print_json(result.report)
        return
    from research.evaluation.tables import print_evaluation

    print_evaluation(result.report)


def _check(what: str, name: str | None, allowed: Sequence[str]) -> None:
    if name is not None and name not in allowed:
        raise InputError(f"no {what} {name!r}; there are: {', '.join(allowed)}")


def _make_folder(option: str, folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{option} {folder} is no folder to write: {error.strerror}") from error


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
