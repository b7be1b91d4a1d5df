"""One fit over the labels of several devices, as chapter 6 of the thesis has it, beside ours.

    PYTHONPATH=. python benchmarks/learner/thesis/devices.py SHEETS NODES --runs RUNS

SHEETS has timm's step times of an RTX 3090 and 4090 (`drawn_sheets.py` cuts them down); NODES has
steps of V100, A100 and others. Whole architectures are held out, of all devices at once,
or rows are mixed, as in the thesis. `thesis-xgboost` learns from all devices in one fit; beside it
stand the same trees and `ours` with a fit for each device, from its own labels among the same rows.
Errors are told for each sheet and device.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trappm.experiments.label_files import read_labels
from trappm.experiments.labelled_workloads import Prepared
from trappm.experiments.workbench import Workbench, opened_workbench
from trappm.learner.baselines.thesis_boosting import listed_card, thesis_xgboost
from trappm.learner.bench.benchmark import PAPER_SEEDS, Plan, Run, Samples, SplitKind, run_plan
from trappm.learner.bench.kept_runs import KeptRuns
from trappm.learner.estimator import Estimate, Estimator, Model, Targets
from trappm.learner.workload import Workload
from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.records import Measurement

TIMM = ("rtx3090_train_step_amp_nchw", "rtx3090_infer_step_amp_nchw", "rtx4090_infer_step_amp_nchw")
NODES = ("pycls_v100_step_fp32", "pgb_torchvision_step")
METRIC = "step_time_ms"
SPLITS = (SplitKind.ARCHITECTURES, SplitKind.CONFIGURATIONS)


@dataclass(frozen=True, eq=False)
class Series:
    """The labels of one sheet on one device, and a predictor of ours for them."""

    name: str
    samples: Samples
    card: str
    ours: Estimator


@dataclass(frozen=True, eq=False)
class OneEachModel:
    """A model for each series."""

    models: Mapping[str, Model]
    series_of: Mapping[Workload, str]

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        median = np.zeros(len(workloads))
        for name, rows in _rows_by_series(workloads, self.series_of):
            median[rows] = self.models[name].predict([workloads[i] for i in rows]).median
        return Estimate(median)


@dataclass(frozen=True, eq=False)
class OneEach:
    """A fit for each series, from its own labels."""

    name: str
    estimators: Mapping[str, Estimator]
    series_of: Mapping[Workload, str]

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> OneEachModel:
        """As `learner.estimator.Estimator`; nothing starts from another device here."""
        models = {}
        for name, rows in _rows_by_series(workloads, self.series_of):
            own = Targets(
                targets.values[rows], targets.above[rows], [targets.groups[i] for i in rows]
            )
            some = [workloads[i] for i in rows]
            models[name] = self.estimators[name].fit(some, own, generator)
        return OneEachModel(models, self.series_of)


def _rows_by_series(
    workloads: Sequence[Workload], series_of: Mapping[Workload, str]
) -> Iterator[tuple[str, list[int]]]:
    rows: dict[str, list[int]] = defaultdict(list)
    for row, workload in enumerate(workloads):
        rows[series_of[workload]].append(row)
    yield from rows.items()


def all_series(bench: Workbench, sheets: Path, nodes: Path) -> list[Series]:
    """Of cards that the catalogue lists."""
    labels: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for path in (*(sheets / f"{n}.csv" for n in TIMM), *(nodes / f"{n}.csv" for n in NODES)):
        for label in read_labels(path):
            if card_of(label.device) is not None:
                labels[path.stem, label.device].append(label)
    result = []
    for (sheet, device), measurements in labels.items():
        prepared: Prepared = bench.prepared(measurements)
        left_out = f", left out: {prepared.left_out}" if prepared.left_out else ""
        sys.stderr.write(f"{sheet} {device}: {len(prepared.samples)} labels{left_out}\n")
        name = f"{device} {'_'.join(sheet.split('_')[:2])}"
        ours = bench.estimator("ours", prepared)
        result.append(Series(name, prepared.samples, prepared.card, ours))
    return result


def together(series: Sequence[Series]) -> Samples:
    """All labels as those of one bench."""
    parts = [s.samples for s in series]
    return Samples(
        configurations=[c for part in parts for c in part.configurations],
        workloads=[w for part in parts for w in part.workloads],
        values=np.concatenate([part.values for part in parts]),
        above=np.concatenate([part.above for part in parts]),
        judged=np.concatenate([part.judged for part in parts]),
        spiked=np.concatenate([part.spiked for part in parts]),
    )


def estimators(series: Sequence[Series]) -> list[Estimator]:
    """The thesis's trees over all series, and over each by itself; ours over each."""
    series_of = {w: s.name for s in series for w in s.samples.workloads}
    cards = {s.name: listed_card(s.card) for s in series}
    trees = thesis_xgboost(lambda workload: cards[series_of[workload]])
    apart = OneEach("thesis-xgboost, one each", dict.fromkeys(cards, trees), series_of)
    ours = OneEach("ours, one each", {s.name: s.ours for s in series}, series_of)
    return [replace(trees, name="thesis-xgboost, all in one"), apart, ours]


def table(series: Sequence[Series], samples: Samples, runs: Sequence[Run]) -> Iterator[str]:
    """Mean +- deviation over seeds / mean of medians, in percent, of each series and of all."""
    names = np.array([s.name for s in series for _ in s.samples.workloads])
    by: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        off = 100 * np.abs(run.estimate.median / samples.values[run.test] - 1)
        for name in (*dict.fromkeys(names.tolist()), "all"):
            chosen = off if name == "all" else off[names[run.test] == name]
            if len(chosen):
                errors = float(chosen.mean()), float(np.median(chosen))
                by[run.split, name, run.estimator].append(errors)
    who = list(dict.fromkeys(run.estimator for run in runs))
    for split in SPLITS:
        yield f"\n{split}\n| labels of | labels | {' | '.join(who)} |\n|---|---|{'---|' * len(who)}"
        for name in (*dict.fromkeys(names.tolist()), "all"):
            count = len(names) if name == "all" else int(np.sum(names == name))
            cells = []
            for estimator in who:
                means, medians = np.array(by[split, name, estimator]).T
                spread = f" ± {means.std(ddof=1):.1f}" if len(means) > 1 else ""
                cells.append(f"{means.mean():.1f}{spread} / {medians.mean():.1f}")
            yield f"| {name} | {count} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sheets", type=Path, help="the folder with timm's sheets")
    parser.add_argument("nodes", type=Path, help="the folder with steps of nodes")
    parser.add_argument("--runs", type=Path, required=True, help="where each run is kept")
    parser.add_argument("--seeds", type=int, default=len(PAPER_SEEDS))
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()

    def watch(done: int, total: int, what: str) -> None:
        sys.stderr.write(f"{done}/{total} {what}\n")

    with opened_workbench(METRIC, processes=options.processes, watch=watch) as bench:
        series = all_series(bench, options.sheets, options.nodes)
    samples = together(series)
    plan = Plan(splits=SPLITS, seeds=PAPER_SEEDS[: options.seeds])
    rows = repr((samples.configurations, samples.values.tolist()))
    kept = KeptRuns(options.runs, (rows,))
    runs = list(run_plan(samples, estimators(series), plan, watch, kept))
    sys.stdout.write("\n".join(table(series, samples, runs)) + "\n")


if __name__ == "__main__":
    main()
