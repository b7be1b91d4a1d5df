"""Whole campaigns against recorded labels: how good is a learner after a strategy's first labels?

A campaign holds whole architectures out, as `evaluate` does, and may choose from all others, runs
that died included: these cost a label and give a bound only. It begins without any label; after
each round the learner is fitted anew and judged on what was held out. The same seed divides alike
for all strategies, so their errors are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from research.evaluation.benchmark import TEST_SHARE, Samples
from research.replay.joint import Joint, JointModel, PoolPoints
from research.replay.strategies import (
    CONDITIONED,
    NEED_GRADIENTS,
    NEED_PREDICTIONS,
    named_strategy,
)
from trappm.learner.acquisition import (
    AcquisitionRequest,
    PoolCovariance,
    cold_start,
)
from trappm.learner.acquisition.pool_covariance import narrow
from trappm.learner.acquisition.pool_knowledge import probability_above
from trappm.learner.estimator import Estimate, Estimator, Model
from trappm.learner.physics.prior import Prior
from trappm.learner.stats.errors import split_architectures
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BUDGETS = (20, 30, 50, 75, 100, 150, 200, 300)
"""Labels after which the learner is fitted and judged, and the next ones chosen."""
STEPS = 55
"""Steps that one measurement takes: 5 to warm up and 50 that are timed, as in the paper."""


@dataclass(frozen=True)
class Point:
    """The errors and costs of a replayed campaign after one round."""

    labels: int
    mape: float
    """In percent, on the architectures held out."""
    median_ape: float
    seconds: float | None
    """Of steps measured until then, warm-up included; None where the labels are no times."""
    died: int
    """Labels that were spent on runs that died."""


@dataclass(frozen=True, eq=False)
class Bench:
    """What all campaigns of a comparison have in common."""

    samples: Samples
    embeddings: npt.NDArray[np.float32]
    """Of the samples' graphs, by an encoder that saw no labels (n, width)."""
    prior: Prior
    """Without labels: of the quick learner, and of what guards every learner from dying runs."""
    estimator: Estimator | None = None
    """The learner that is judged; by default the quick one (`research.replay.joint`)."""
    knows_physics: bool = True
    """Whether the learner stands on the prior, so that a strategy may use what that knows."""
    times: bool = False
    """Whether the values are step times in ms, which are what a measurement takes."""

    @property
    def capacity(self) -> float | None:
        """What runs died of; None if none did."""
        above = self.samples.above[~np.isnan(self.samples.above)]
        return float(np.median(above)) if len(above) else None


def replay(bench: Bench, strategy: str, seed: int, budgets: Sequence[int]) -> Iterator[Point]:
    """One campaign; a point after each budget.

    Raises:
        InputError: there are fewer labels to choose from than the largest budget, or no such
            strategy; or no label that was held out has a value.
    """
    samples, chooser = bench.samples, named_strategy(strategy)
    held_out = split_architectures(
        samples.configurations, TEST_SHARE, np.random.default_rng(seed), samples.groups
    )
    test = np.array([name in held_out for name in samples.architectures])
    pool = np.flatnonzero(~test)
    if len(pool) < max(budgets):
        raise InputError(f"{max(budgets)} labels cannot be chosen from {len(pool)}")
    if not (test & samples.judged & ~np.isnan(samples.values)).any():
        raise InputError(f"seed {seed} holds out no label with a usable value; give more labels")
    view = _View(bench, pool)
    labelled = np.zeros(0, dtype=np.int64)
    for budget in budgets:
        generator = np.random.default_rng([seed, budget])
        request = view.request(labelled, budget, generator, strategy)
        picks = (chooser if len(labelled) else cold_start(chooser)).select(request)
        labelled = np.concatenate([labelled, [pick.index for pick in picks]]).astype(np.int64)
        view.learn(labelled, np.random.default_rng([seed, budget, 1]))
        yield _point(bench, pool[labelled], view.predict(np.flatnonzero(test)), test)


class _View:
    """What a strategy may see of the pool, and the learner that learns from its choices."""

    def __init__(self, bench: Bench, pool: IntArray) -> None:
        self._bench = bench
        self._pool = pool
        self._workloads = bench.samples.at(pool)
        self._families = bench.samples.families[pool].tolist()
        self._embeddings = bench.embeddings[pool]
        self._static = np.stack([w.static_features for w in self._workloads])
        self._joint = Joint(bench.prior, PoolPoints.of(bench.prior, self._workloads))
        self._quick: JointModel = self._joint.fit(
            [], bench.samples.targets([]), np.random.default_rng(0)
        )
        # Without labels the covariance is as good a guide as with some, and a batch is as good as
        # its picks one by one: see docs/studies/choosing.md.
        self._covariance = self._believed()
        self._model: Model = self._quick

    def request(
        self,
        labelled: IntArray,
        budget: int,
        generator: np.random.Generator,
        strategy: str,
    ) -> AcquisitionRequest:
        """The next request; with predictions of the whole pool, and gradients of the learner that
        is judged, only where they are needed."""
        capacity = self._bench.capacity
        guards = strategy in ("ours", *CONDITIONED) and capacity is not None
        predicted = guards or strategy in NEED_PREDICTIONS
        estimate = self._quick.predict(self._workloads) if predicted else None
        knows_physics = self._bench.knows_physics
        covariance = self._believed() if strategy in CONDITIONED else self._covariance
        gradients = None
        if strategy in NEED_GRADIENTS and (knows_physics or len(labelled)):
            # Of a learner without gradients those of the quick one, if both stand on the prior.
            learner = self._model if hasattr(self._model, "gradients") else self._quick
            if knows_physics or learner is self._model:
                gradients = learner.gradients(self._workloads)
        values = self._bench.samples.values[self._pool[labelled]]
        return AcquisitionRequest(
            embeddings=self._embeddings,
            static_features=self._static,
            labelled=labelled,
            candidates=np.arange(len(self._pool)),
            count=budget - len(labelled),
            generator=generator,
            families=self._families,
            covariances=[covariance] if knows_physics else [],
            gradients=gradients,
            log_values=np.log(values),
            uncertainty=self._uncertainty(estimate) if len(labelled) else None,
            predicted_cost=estimate.median if estimate and self._bench.times else None,
            failure=probability_above(estimate, capacity) if estimate and capacity else None,
        )

    def _believed(self) -> PoolCovariance:
        """By the quick learner as it is fitted: at its constants, with its amplitude and noise.

        What labels have taken of it, a strategy works out for itself, as it does for what is
        pending.
        """
        wide = self._quick.covariance(self._workloads, np.random.default_rng(0))
        return PoolCovariance(narrow(wide.features), wide.noise)

    def _uncertainty(self, estimate: Estimate | None) -> Array | None:
        """By the quick learner; a purely learned one states its own."""
        if estimate is None or self._bench.knows_physics:
            return None if estimate is None else estimate.log_std_of_mean
        return self._model.predict(self._workloads).log_std_of_mean

    def learn(self, labelled: IntArray, generator: np.random.Generator) -> None:
        rows = self._pool[labelled]
        samples, estimator = self._bench.samples, self._bench.estimator
        workloads, targets = samples.at(rows), samples.targets(rows)
        self._quick = self._joint.fit(workloads, targets, generator)
        self._model = self._quick
        if estimator is not None:
            self._model = estimator.fit(workloads, targets, generator)

    def predict(self, rows: IntArray) -> Estimate:
        return self._model.predict(self._bench.samples.at(rows))


def _point(bench: Bench, rows: IntArray, estimate: Estimate, test: npt.NDArray[np.bool_]) -> Point:
    samples = bench.samples
    values = samples.values[test]
    judged = samples.judged[test] & ~np.isnan(values)
    errors = 100.0 * np.abs(estimate.median[judged] / values[judged] - 1.0)
    spent = samples.values[rows]
    return Point(
        labels=len(rows),
        mape=float(errors.mean()),
        median_ape=float(np.median(errors)),
        seconds=float(np.nansum(spent)) * STEPS / 1e3 if bench.times else None,
        died=int(np.isnan(spent).sum()),
    )
