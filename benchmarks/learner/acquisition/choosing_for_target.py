"""Which labels of a second device to buy, where the first one has taught its heads already.

    PYTHONPATH=. python benchmarks/learner/acquisition/choosing_for_target.py ../shared/data
        --traces FOLDER --pair v100|4090 [--ways A,B,...] [--judge prior|head] [--seeds 20]
        [--first-seed 0]

Each seed holds a fifth of the architectures out of both devices' labels, fits a head to the
source's labels, starts the target's from it, and fits it anew to the labels that each way chooses
first. Errors are those on what is held out; a uniform draw is the mean of three. Labels are counted
to the errors of its curve. Kernels are traced once and kept in FOLDER; of the RTX 3090 and 4090 the
models count whose kernels are there (those that `other_devices.py` draws).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.learner import step_time
from benchmarks.learner.step_time_nodes import published_steps
from trappm.learner.acquisition import AcquisitionRequest, Covariance, strategy_named
from trappm.learner.acquisition.pool_knowledge import PoolKnowledge
from trappm.learner.bench.replay import Point
from trappm.learner.estimator import Targets
from trappm.learner.heads.metric_head import Head, Ours
from trappm.learner.physics.device_specs import DeviceSpec, spec_of
from trappm.learner.physics.devices.joint_fit import Distribution
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.prior import TRANSFER_TIGHTNESS, Prior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.workload import Workload
from trappm.profiler.records import Phase
from trappm.terminal.replay_tables import (
    area,
    jackknife_error,
    seconds_to_same_error,
    standard_error,
)

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ROWS = 250
"""Of each sheet of timm's: tracing all 1,165 models takes half an hour."""
BUDGETS = (2, 4, 6, 8, 12, 16, 24, 32)
DRAWS = 3
"""Of the uniform draw in each split, so that it is not luck that others are compared with."""
UNIFORM = "uniform"
REACHED = (8, 16, 32)
"""Labels of a uniform draw whose errors others are to reach."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Step times of one device."""

    spec: DeviceSpec
    workloads: Sequence[Workload]
    step_time_ms: Array
    architectures: npt.NDArray[np.str_]

    def at(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Labels:
        chosen = np.arange(len(self.workloads))[rows].tolist()
        workloads = [self.workloads[i] for i in chosen]
        return Labels(self.spec, workloads, self.step_time_ms[rows], self.architectures[rows])


def of_nodes(card: str, data: Path, traces: Path) -> Labels:
    """fp32 steps of one card, training and inference, of all that published some."""
    parts = [s for s in published_steps(data / "nodes", traces) if s.evidence.device == card]
    workloads = [
        replace(workload, host=part.evidence.host)
        for part in parts
        for workload in part.evidence.workloads
    ]
    return Labels(
        parts[0].evidence.spec,
        workloads,
        np.exp(np.concatenate([part.evidence.log_values for part in parts])),
        np.concatenate([part.architectures for part in parts]),
    )


def of_timm(key: str, data: Path, traces: Path) -> Labels:
    """timm's inference steps in autocast: `ROWS` of the sheet, drawn at random."""
    source = step_time.SOURCES[key]
    labels = step_time.load(source, data, traces, ROWS)
    return Labels(
        spec_of(source.device),
        labels.workloads,
        labels.step_time_ms,
        labels.current_names,
    )


def pair_of(name: str, data: Path, traces: Path) -> tuple[Labels, Labels]:
    """Labels of source and target."""
    if name == "v100":
        return of_nodes("a100", data, traces), of_nodes("v100", data, traces)
    return of_timm("infer-3090", data, traces), of_timm("infer-4090", data, traces)


class Learner:
    """The learner of a target, after a source: its prior alone, or the whole head."""

    def __init__(
        self, source: Labels, target: DeviceSpec, judge: str, start: str, seed: int
    ) -> None:
        self._seed = seed
        self._start: Head[Prior] | None = None
        if start == "known":
            prior, self._prior = (
                StepTimePrior.like_others(spec, known_devices()) for spec in (source.spec, target)
            )
        else:
            prior, self._prior = StepTimePrior(source.spec), StepTimePrior(target)
        taught: Prior = prior
        if judge == "head":
            self._start = self._fitted(prior, source, None)
            taught = self._start.prior
        else:
            taught = prior.refit(source.workloads, np.log(source.step_time_ms))
        assert isinstance(taught, StepTimePrior)
        self.moved = self._prior.started_from(taught)
        """The target's prior before any label of its own."""

    def _fitted(self, prior: Prior, labels: Labels, start: Head[Prior] | None) -> Head[Prior]:
        values = labels.step_time_ms
        targets = Targets(values, np.full(len(values), np.nan), labels.architectures.tolist())
        generator = np.random.default_rng(self._seed)
        return Ours(prior).fit(labels.workloads, targets, generator, start)

    def errors(self, labels: Labels, test: Labels) -> Array:
        """Absolute percentage errors on the test rows after these labels of the target (n)."""
        if self._start is None:
            prior = self.moved.refit(
                labels.workloads, np.log(labels.step_time_ms), tightness=TRANSFER_TIGHTNESS
            )
            predicted = np.exp(prior.log_values(test.workloads))
        else:
            head = self._fitted(self._prior, labels, self._start)
            predicted = head.predict(test.workloads).median
        errors: Array = 100 * np.abs(predicted / test.step_time_ms - 1)
        return errors


@dataclass(frozen=True, eq=False)
class View:
    """What a way may see: workloads that can be labelled, and what the source has taught."""

    target: Labels
    moved: StepTimePrior
    count: int
    seed: int

    def picks(self, strategy: str, covariances: Sequence[Covariance], *, taught: bool) -> list[int]:
        """As a campaign asks; embeddings are the shares of a step by kind of kernel."""
        workloads = self.target.workloads
        settings = [[w.batch_size, w.phase is Phase.INFER] for w in workloads]
        request = AcquisitionRequest(
            embeddings=self.moved.features(workloads).astype(np.float32),
            static_features=np.array(settings, dtype=np.float64),
            labelled=np.zeros(0, dtype=np.int64),
            candidates=np.arange(len(workloads)),
            count=self.count,
            generator=np.random.default_rng(self.seed),
            covariances=covariances,
            taught=taught,
        )
        return [pick.index for pick in strategy_named(strategy).select(request)]

    def known(self, others: Distribution | None = None) -> list[Covariance]:
        known = PoolKnowledge.of(
            self.target.workloads,
            ["step_time_ms"],
            self.target.spec,
            np.random.default_rng(self.seed),
            others=others,
        )
        return list(known.covariances.values())

    def difference(self) -> list[Covariance]:
        """As known devices differ, from where the source's labels have moved the constants."""
        return self.known(replace(known_devices(), centre=self.moved.constants))


Way = Callable[[View], list[int]]

WAYS: Mapping[str, Way] = {
    "ours": lambda view: view.picks("ours", view.difference(), taught=True),
    "around-centre": lambda view: view.picks("ours", view.known(known_devices()), taught=True),
    "represents-too": lambda view: view.picks("ours", view.difference(), taught=False),
    "first-device": lambda view: view.picks("ours", view.known(), taught=False),
    "representation": lambda view: view.picks("facility", [], taught=False),
}
"""`ours` is what a campaign does on its target, `first-device` what it does on its source."""


def curves(
    pair: tuple[Labels, Labels], ways: Sequence[str], judge: str, start: str, seed: int
) -> dict[str, list[float]]:
    """Mean error on what is held out after each budget, by way."""
    source, target = pair
    test = step_time.held_out(target.architectures, seed)
    unseen, pool = target.at(test), target.at(~test)
    known = source.at(~np.isin(source.architectures, unseen.architectures))
    learner = Learner(known, target.spec, judge, start, seed)
    view = View(pool, learner.moved, max(BUDGETS), seed)

    def curve(order: Sequence[int]) -> Array:
        return np.array(
            [learner.errors(pool.at(np.array(order[:budget])), unseen).mean() for budget in BUDGETS]
        )

    generator = np.random.default_rng([seed, 1])
    orders = [generator.permutation(len(pool.workloads)).tolist() for _ in range(DRAWS)]
    result = {UNIFORM: np.mean([curve(order) for order in orders], axis=0).tolist()}
    for way in ways:
        result[way] = curve(WAYS[way](view)).tolist()
    return result


def table(runs: Sequence[Mapping[str, Sequence[float]]], test_share: float) -> str:
    """Errors by way and budget, and labels to the errors of the uniform draw in percent."""
    lines = [f"way | {' | '.join(map(str, BUDGETS))} | area, % | labels, % | like {REACHED} | wins"]
    base = np.array([run[UNIFORM] for run in runs])
    for way in runs[0]:
        errors = np.array([run[way] for run in runs])
        cells = [way, *(f"{error:.2f}" for error in errors.mean(axis=0))]
        if way != UNIFORM:
            places = np.log(BUDGETS)
            percent = 100 * (area(places, errors) / area(places, base) - 1)
            own, uniform = _points(errors), _points(base)
            fewer = seconds_to_same_error(own, uniform)
            error = jackknife_error(own, uniform, test_share)
            cells.append(f"{percent.mean():+.1f} ± {standard_error(percent, test_share) or 0:.1f}")
            cells.append("-" if fewer is None else f"{fewer:+.0f} ± {error or 0:.0f}")
            means = errors.mean(axis=0), base.mean(axis=0)
            cells.append(", ".join(labels_to(*means, budget) for budget in REACHED))
            cells.append(f"{int((percent < 0).sum())}/{len(runs)}")
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def labels_to(errors: Array, uniform: Array, budget: int) -> str:
    """How many labels reach the error that the uniform draw has with this many.

    Between budgets in the logarithm, on curves that are made to fall.
    """
    target = np.minimum.accumulate(uniform)[BUDGETS.index(budget)]
    falling = np.minimum.accumulate(errors)
    if falling[-1] > target:
        return f"over {BUDGETS[-1]}"
    if falling[0] <= target:
        return f"at most {BUDGETS[0]}"
    return f"{np.exp(np.interp(-target, -falling, np.log(BUDGETS))):.1f}"


def _points(errors: Array) -> list[list[Point]]:
    """Labels in place of seconds."""
    return [
        [Point(n, e, e, float(n), 0) for n, e in zip(BUDGETS, row, strict=True)]
        for row in errors.tolist()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the published labels")
    parser.add_argument("--traces", type=Path, required=True, help="where kernels are kept")
    parser.add_argument("--pair", choices=("v100", "4090"), required=True)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--judge", choices=("prior", "head"), default="prior")
    parser.add_argument("--start", choices=("known", "specification"), default="specification")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    pair = pair_of(options.pair, options.data, options.traces)
    sys.stderr.write(f"{len(pair[0].workloads)} and {len(pair[1].workloads)} labels\n")
    runs: list[dict[str, list[float]]] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        runs.append(curves(pair, options.ways.split(","), options.judge, options.start, seed))
        last = {way: np.round(errors, 1).tolist() for way, errors in runs[-1].items()}
        sys.stderr.write(f"seed {seed}: {json.dumps(last)}\n")
    print(table(runs, step_time.HELD_OUT))


if __name__ == "__main__":
    main()
