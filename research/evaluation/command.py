"""`python -m research evaluate`: errors of TraPPM and of published predictors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from research.evaluation.benchmark import PAPER_SEEDS, SPLIT_TITLES, SplitKind
from research.evaluation.evaluation import Request, evaluate_files, evaluate_splits
from research.evaluation.label_files import metric_column, read_usable
from research.evaluation.workbench import Workbench
from research.peers.graph_networks import SIZES
from research.peers.predictors import check_names
from trappm.cli.options import AsJson, print_json
from trappm.profiler.errors import InputError
from trappm.profiler.records import number_text
from trappm.terminal.tables import console, print_table

MAX_SEEDS = 20
MAX_COUNTS = 10

MetricName = Annotated[str, typer.Option(help="memory, step-time, power or energy.")]
Usable = Annotated[
    Path | None,
    typer.Option(help="Sheet of architecture, batch_size, class, spike: evaluate usable rows."),
]
GraphProcesses = Annotated[
    int | None,
    typer.Option(min=1, max=256, help="Processes for missing graphs (default: one per core)."),
]


def evaluate(
    suite: Annotated[
        Literal["paper"] | None, typer.Option(help="Suite: paper runs all splits.")
    ] = None,
    train: Annotated[Path | None, typer.Option(help="Labels to learn from.")] = None,
    test: Annotated[Path | None, typer.Option(help="Labels to evaluate on.")] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Labels to split: an export, or a published sheet.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Split this device's labels of the label store instead.")
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
        str | None, typer.Option(help="Additional numbers of training labels, such as 20,50,100.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="Labels of another device: also start from its models.")
    ] = None,
    usable: Usable = None,
    size: Annotated[str, typer.Option(help="Size of baselines: laptop or paper.")] = "laptop",
    processes: GraphProcesses = None,
    as_json: AsJson = False,
) -> None:
    """Train predictors on labels and evaluate them on held-out labels.

    Uses two files with --train and --test, else splits of one set of labels. Missing graphs are
    created and stored, which takes a second or more per architecture.
    """
    files = train is not None or test is not None
    if files and (train is None or test is None):
        raise InputError("--train and --test must be given together")
    if files and any((suite, labels, device, split, label_counts)):
        raise InputError("--train and --test cannot be combined with options of splits")
    if not files and (labels is None) == (device is None):
        raise InputError("give labels: a file with --labels, or a device of the store (--device)")
    if size not in SIZES:
        raise InputError(f"Unknown size {size!r}. Expected one of: {', '.join(SIZES)}")
    check_names(estimator or ())
    chosen = estimator or (["ours"] if files else None)
    counts = _counts(label_counts)
    bench = Workbench(
        metric=metric_column(metric),
        processes=processes or len(os.sched_getaffinity(0)),
        usable=None if usable is None else read_usable(usable),
    )
    request = Request(
        bench=bench,
        estimators=None if chosen is None else list(dict.fromkeys(chosen)),
        size=size,
        seeds=tuple(PAPER_SEEDS[0] + i for i in range(seeds)),
        label_counts=counts,
        start=start,
    )
    if train is not None and test is not None:
        report = evaluate_files(request, train, test)
    else:
        wanted = split or (list(SplitKind) if suite else [SplitKind.ARCHITECTURES])
        kinds = [kind for kind in SplitKind if kind in wanted]
        report = evaluate_splits(request, kinds, labels=labels, device=device)
    if as_json:
        print_json(report)
    else:
        print_evaluation(report)


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


COLUMNS = ("MAPE_%", "median_%", "CRPS_%", "coverage_%", "within_10_%", "tau", "RMSE")
_WITH_DEVIATION = frozenset({"mape", "median_ape"})
"""Errors shown with their deviation over seeds in tables; JSON has all."""
_KEYS = ("mape", "median_ape", "crps", "coverage", "within_10_percent", "kendall_tau", "rmse")


def print_evaluation(report: Mapping[str, Any]) -> None:
    """Print the tables of a report, of splits or of two files."""
    results, about = report["results"], f"{report['metric']} on {report['device']}"
    if "train" in report:
        train, counts = report["train"], report["test"]
        console().print(
            f"{about}: {train['count']} training labels, {counts['judged']} test labels; "
            f"{counts['architectures_in_training']} of its {counts['architectures']} architectures "
            "are in the training file"
        )
        parts = {"": results}
    else:
        counts = report["labels"]
        console().print(
            f"{about}: {counts['count']} labels of {counts['architectures']} architectures, "
            f"{counts['judged']} of them evaluated"
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
