"""Splits of labels, training of all predictors on the same splits, and their errors.

The main split holds out whole architectures, 30 % of each family. Harder splits hold out whole
families. The paper's split is by configuration, 70:30 in each family, so batch variants of one
architecture are on both sides; it is used to compare with the paper. The seed fixes all draws.
"""

from __future__ import annotations

import enum
import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from trappm.learner.interface import Estimate, Estimator, Model, Targets, Workload
from trappm.learner.stats.calibration import LEVELS
from trappm.learner.stats.errors import Accuracy, accuracy, split_architectures
from trappm.learner.stats.folds import content_groups
from trappm.profiler.errors import InputError
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Configuration

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.bool_]

PAPER_SEEDS = (1337, 1338, 1339, 1340, 1341)
TEST_SHARE = 0.3
FAMILY_SHARE = 0.2
"""Minimum share of the labels in held-out families."""
MIN_IN_FAMILY = 3
"""Minimum number of architectures of a family that is held out alone."""


class SplitKind(enum.StrEnum):
    """Kind of split; only the last has the same architectures on both sides."""

    ARCHITECTURES = "architectures"
    FAMILIES = "families"
    EACH_FAMILY = "each-family"
    CONFIGURATIONS = "configurations"


SPLIT_TITLES: Mapping[SplitKind, str] = {
    SplitKind.ARCHITECTURES: "whole architectures held out, 30 % of each family",
    SplitKind.FAMILIES: "whole families held out, 20 % of the labels",
    SplitKind.EACH_FAMILY: "one family left out at a time",
    SplitKind.CONFIGURATIONS: "the paper's split, by configuration, 70:30 in each family",
}


@dataclass(frozen=True, eq=False)
class Samples:
    """Labels of one metric on one device (n) with all inputs of predictors."""

    configurations: Sequence[Configuration]
    workloads: Sequence[Workload]
    values: Array
    """Labels in the metric's unit, shape (n,); NaN where only a bound is known."""
    above: Array
    """Lower bounds for those, shape (n,); NaN elsewhere."""
    judged: Rows
    """Rows whose errors count, shape (n,); all rows are learned from."""
    spiked: Rows
    """Real but unusual rows, shape (n,): errors are reported without them as well."""

    def __len__(self) -> int:
        return len(self.configurations)

    @property
    def architectures(self) -> list[str]:
        return [c.architecture for c in self.configurations]

    @cached_property
    def groups(self) -> list[str]:
        """Return the held-out group of each row: identical layers at any batch size."""
        return content_groups(self.architectures, self.workloads)

    @property
    def families(self) -> npt.NDArray[np.str_]:
        return np.array([family_of(name) for name in self.architectures], dtype=np.str_)

    def targets(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Targets:
        groups = self.groups
        return Targets(self.values[rows], self.above[rows], [groups[i] for i in rows])

    def at(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> list[Workload]:
        return [self.workloads[i] for i in rows]


@dataclass(frozen=True)
class Split:
    """Division of samples into training and test rows."""

    kind: SplitKind
    seed: int
    train: Rows
    test: Rows


@dataclass(frozen=True)
class BenchmarkRun:
    """One training and its predictions."""

    estimator: str
    split: SplitKind
    seed: int
    labels: int | None
    """Number of training labels, or None for all."""
    transferred: bool
    """True if the training started from another device's model."""
    test: npt.NDArray[np.int64]
    """Predicted rows, shape (t,)."""
    estimate: Estimate
    """Predictions of these rows."""


@dataclass(frozen=True, eq=False)
class SourceDevice:
    """Labels of another device, and the estimators that learn from them."""

    samples: Samples
    estimators: Mapping[str, Estimator]
    """Estimators with this device's specification, by the name of the estimator that starts."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkPlan:
    """Plan of trainings: all combinations of its fields."""

    splits: Sequence[SplitKind]
    seeds: Sequence[int] = PAPER_SEEDS
    label_counts: Sequence[int] = ()
    """Additional numbers of training labels, drawn uniformly, for learning curves. Below an
    estimator's `least_labels` only the start is evaluated; counts above a split's are omitted."""
    source: SourceDevice | None = None
    """Another device, whose models are additional starting points."""


def splits_of(samples: Samples, kind: SplitKind, seeds: Sequence[int]) -> Iterator[Split]:
    """Yield the splits of one kind, one per seed; leaving out each family needs one seed only.

    Raises:
        InputError: There is too little to divide.
    """
    if kind is SplitKind.EACH_FAMILY:
        families, names = samples.families, np.array(samples.architectures)
        large = [
            family
            for family in sorted(set(families.tolist()))
            if len(set(names[families == family])) >= MIN_IN_FAMILY
        ]
        if len(large) < 2:
            raise InputError("family splits need two families with at least three architectures")
        for family in large:
            test = families == family
            yield Split(kind, seeds[0], _train_mask(samples, test), test)
        return
    for seed in seeds:
        test = _test_mask(samples, kind, np.random.default_rng(seed))
        train = ~test if kind is SplitKind.CONFIGURATIONS else _train_mask(samples, test)
        if not test.any() or not train.any():
            raise InputError(f"{len(samples)} labels are too few to hold out {kind}")
        yield Split(kind, seed, train, test)


def _train_mask(samples: Samples, test: Rows) -> Rows:
    """Return the training rows, without held-out rows and rows with the same layers."""
    groups = np.array(samples.groups)
    return ~np.isin(groups, groups[test])


def _test_mask(samples: Samples, kind: SplitKind, generator: np.random.Generator) -> Rows:
    if kind is SplitKind.ARCHITECTURES:
        names = split_architectures(samples.configurations, TEST_SHARE, generator, samples.groups)
        return np.array([name in names for name in samples.architectures])
    families = samples.families
    test = np.zeros(len(samples), dtype=bool)
    if kind is SplitKind.FAMILIES:
        for family in generator.permutation(sorted(set(families.tolist()))):
            if test.mean() >= FAMILY_SHARE:
                break
            test |= families == family
        return test
    for family in sorted(set(families.tolist())):
        members = generator.permutation(np.flatnonzero(families == family))
        test[members[: round(TEST_SHARE * len(members))]] = True
    return test


def run_plan(
    samples: Samples,
    estimators: Sequence[Estimator],
    plan: BenchmarkPlan,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Iterator[BenchmarkRun]:
    """Run every training of the plan in order, and predict the held-out rows."""
    jobs = list(_jobs(samples, estimators, plan))
    starts = None if plan.source is None else _SourceModels(samples, plan.source)
    for done, (split, estimator, count, transferred) in enumerate(jobs):
        on_progress(done, len(jobs), f"{estimator.name}, {split.kind} held out, seed {split.seed}")
        rows, test = _train_rows(split, count), np.flatnonzero(split.test)
        start = starts.model(estimator.name, split) if starts and transferred else None
        if start is not None and not _has_enough_labels(estimator, samples, rows):
            model = start
        else:
            generator = _generator(estimator.name, split)
            model = estimator.fit(samples.at(rows), samples.targets(rows), generator, start)
        estimate = model.predict(samples.at(test))
        yield BenchmarkRun(
            estimator.name, split.kind, split.seed, count, transferred, test, estimate
        )
    on_progress(len(jobs), len(jobs), "")


def _generator(name: str, split: Split) -> np.random.Generator:
    """Return a generator seeded by the name: an estimator does not depend on the others."""
    return np.random.default_rng([split.seed, zlib.crc32(name.encode())])


class _SourceModels:
    """Models of another device, trained without the architectures that a split holds out.

    Splits by configuration hold out the same configurations instead.
    """

    def __init__(self, samples: Samples, source: SourceDevice) -> None:
        self._source = source
        self._last: tuple[str, Split, Model] | None = None
        both = samples, source.samples
        groups = content_groups(
            [name for part in both for name in part.architectures],
            [workload for part in both for workload in part.workloads],
        )
        self._groups = np.array(groups[: len(samples)])
        self._groups_of_source = np.array(groups[len(samples) :])
        self._configurations, self._configurations_of_source = (
            np.array([f"{c.architecture} {c.batch_size}" for c in part.configurations])
            for part in both
        )

    def model(self, name: str, split: Split) -> Model:
        """Return the start of an estimator; raises InputError if no label of the source is left."""
        if self._last is not None and self._last[0] == name and self._last[1] is split:
            return self._last[2]
        if split.kind is SplitKind.CONFIGURATIONS:
            here, there = self._configurations, self._configurations_of_source
        else:
            here, there = self._groups, self._groups_of_source
        source = self._source
        rows = np.flatnonzero(~np.isin(there, here[split.test]))
        if not len(rows):
            raise InputError("all labels of the other device are held out; give it more labels")
        model = source.estimators[name].fit(
            source.samples.at(rows), source.samples.targets(rows), _generator(name, split)
        )
        self._last = name, split, model
        return model


def _jobs(
    samples: Samples, estimators: Sequence[Estimator], plan: BenchmarkPlan
) -> Iterator[tuple[Split, Estimator, int | None, bool]]:
    """Yield each split with each estimator and number of labels, with and without a start."""
    splits = [split for kind in plan.splits for split in splits_of(samples, kind, plan.seeds)]
    starting = () if plan.source is None else plan.source.estimators
    for split, estimator, count in itertools.product(
        splits, estimators, (None, *plan.label_counts)
    ):
        for transferred in (False, True) if estimator.name in starting else (False,):
            if count is None or (
                split.kind is not SplitKind.EACH_FAMILY
                and count <= np.count_nonzero(split.train)
                and (
                    transferred or _has_enough_labels(estimator, samples, _train_rows(split, count))
                )
            ):
                yield split, estimator, count, transferred


def _train_rows(split: Split, count: int | None) -> npt.NDArray[np.int64]:
    """Return the training rows, equal for every estimator; smaller sets are nested in larger."""
    rows = np.flatnonzero(split.train)
    if count is None:
        return rows
    return np.sort(np.random.default_rng([split.seed, 1]).permutation(rows)[:count])


def _has_enough_labels(estimator: Estimator, samples: Samples, rows: npt.NDArray[np.int64]) -> bool:
    """Return whether the rows have as many values as the estimator needs."""
    values = np.count_nonzero(~np.isnan(samples.values[rows]))
    return int(values) >= int(getattr(estimator, "least_labels", 0))


NOMINAL = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Nominal coverage of the central intervals that are checked."""

Score = dict[str, Any]
"""Errors of the predictions of some rows: `accuracy` (None where no row is judged), `by_family`;
where there are spikes, `without_spikes`; where runs ran out of memory, `out_of_memory`; where the
predictor knows a distribution, `reliability`: coverage of intervals of each NOMINAL in percent."""


def score(samples: Samples, test: npt.NDArray[np.int64], estimate: Estimate) -> Score:
    """Return the errors of predictions of the rows `test` of the samples.

    Raises:
        InputError: A prediction is NaN; omitting it would bias the errors.
    """
    if missing := int((~np.isfinite(estimate.median)).sum()):
        raise InputError(f"{missing} of {len(test)} predictions are NaN; fix the predictor")
    measured, families = samples.values[test], samples.families[test]
    judged = samples.judged[test] & ~np.isnan(measured)

    def accuracy_of(rows: Rows) -> Accuracy | None:
        columns = (estimate.low, estimate.high, estimate.log_quantiles)
        low, high, quantiles = (None if column is None else column[rows] for column in columns)
        if not rows.any():
            return None
        return accuracy(measured[rows], estimate.median[rows], low, high, quantiles)

    result: Score = {
        "accuracy": accuracy_of(judged),
        "by_family": {
            family: accuracy_of(judged & (families == family))
            for family in sorted(set(families[judged].tolist()))
        },
    }
    spiked = samples.spiked[test]
    if (judged & spiked).any():
        result["without_spikes"] = accuracy_of(judged & ~spiked)
    if estimate.log_quantiles is not None and judged.any():
        covered = coverages(estimate.log_quantiles[judged], np.log(measured[judged]))
        names = [f"{100 * nominal:.0f}" for nominal in NOMINAL]
        result["reliability"] = dict(zip(names, (100 * covered).tolist(), strict=True))
    died = ~np.isnan(samples.above[test])
    if died.any():
        # A run is predicted to run out of memory above the smallest bound of such runs.
        capacity = float(np.median(samples.above[test][died]))
        predicted = estimate.median > capacity
        right, warned = int((died & predicted).sum()), int(predicted[died | judged].sum())
        result["out_of_memory"] = {
            "died": int(died.sum()),
            "precision": right / warned if warned else None,
            "recall": right / int(died.sum()),
            "capacity": capacity,
        }
    return result


def summarize(samples: Samples, runs: Sequence[BenchmarkRun]) -> list[dict[str, Any]]:
    """Return mean and deviation over seeds by estimator, split and number of labels.

    Errors by family pool all seeds, because each seed draws only a few rows.
    """
    groups: dict[tuple[Any, ...], list[BenchmarkRun]] = defaultdict(list)
    for run in runs:
        groups[run.split, run.labels, run.transferred, run.estimator].append(run)
    return [
        {
            "split": str(split),
            "estimator": estimator,
            "labels": labels,
            "transferred": transferred,
            **_over_seeds(samples, members, split),
        }
        for (split, labels, transferred, estimator), members in groups.items()
    ]


def _over_seeds(samples: Samples, runs: Sequence[BenchmarkRun], split: SplitKind) -> dict[str, Any]:
    together = score(samples, *join_runs(runs))
    # Leave-one-family-out is a single experiment in parts, not one per seed.
    is_one = split is SplitKind.EACH_FAMILY
    parts = [together] if is_one else [score(samples, run.test, run.estimate) for run in runs]
    result: dict[str, Any] = {"seeds": [] if is_one else [run.seed for run in runs]}
    for name in ("accuracy", "without_spikes", "out_of_memory"):
        known = pd.DataFrame([part[name] for part in parts if part.get(name)], dtype=float)
        if len(known):
            result[name] = _plain(known.mean())
            result[f"{name}_deviation"] = _plain(known.std()) if len(known) > 1 else {}
    if "reliability" in together:
        result["reliability"] = together["reliability"]
    return result | {"by_family": together["by_family"]}


def _plain(values: pd.Series) -> dict[str, float | None]:
    return {str(name): None if np.isnan(v) else float(v) for name, v in values.items()}


def join_runs(runs: Sequence[BenchmarkRun]) -> tuple[npt.NDArray[np.int64], Estimate]:
    """Return rows and predictions of several runs, one after the other."""

    def column(name: str) -> npt.NDArray[np.float64] | None:
        parts = [getattr(run.estimate, name) for run in runs]
        return None if any(part is None for part in parts) else np.concatenate(parts)

    test = np.concatenate([run.test for run in runs])
    return test, Estimate(
        median=np.concatenate([run.estimate.median for run in runs]),
        low=column("low"),
        high=column("high"),
        log_quantiles=column("log_quantiles"),
    )


def coverages(log_quantiles: Array, logs: Array) -> Array:
    """Return the share of n values inside the central interval of each of `NOMINAL` (nominal)."""
    shares = []
    for nominal in NOMINAL:
        low, high = (_quantile(log_quantiles, (1 + sign * nominal) / 2) for sign in (-1, 1))
        shares.append(float(np.mean((low <= logs) & (logs <= high))))
    return np.array(shares)


def _quantile(log_quantiles: Array, level: float) -> Array:
    """Return the quantile of n distributions at a level (n), by linear interpolation."""
    after = min(max(int(np.searchsorted(LEVELS, level)), 1), len(LEVELS) - 1)
    share = (level - LEVELS[after - 1]) / (LEVELS[after] - LEVELS[after - 1])
    between: Array = (1 - share) * log_quantiles[:, after - 1] + share * log_quantiles[:, after]
    return between
