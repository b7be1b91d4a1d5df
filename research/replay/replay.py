"""Replay of whole campaigns on recorded labels, with errors after each round.

A campaign holds out whole architectures, as `evaluate` does, and may acquire all other labels,
including runs that ran out of memory, which give only a bound. It starts without labels. After each
round the learner is refitted and evaluated on the held-out labels. All strategies with the same
seed use the same split, so their errors are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from research.evaluation.benchmark import TEST_SHARE, Samples
from research.replay.strategies import STUDIED, Lcmd, ReplayRequest, gradients_of
from trappm.learner.acquisition import (
    STRATEGIES,
    Strategy,
    cold_start,
    strategy_named,
)
from trappm.learner.acquisition.pool_knowledge import PoolKnowledge, probability_above
from trappm.learner.acquisition.request import AcquisitionRequest, Pick, explain_picks
from trappm.learner.acquisition.strategies import RandomChoice
from trappm.learner.interface import Estimate, Estimator, Model
from trappm.learner.paper.training import seed_torch
from trappm.learner.stats.errors import split_architectures
from trappm.profiler.devices.catalogue import DeviceSpec
from trappm.profiler.errors import InputError, nearest

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BUDGETS = (20, 30, 50, 75, 100, 150, 200, 300)
"""Numbers of labels at which the learner is fitted and evaluated and a batch is acquired."""
STEPS = 55
"""Steps per measurement: 5 warm-up and 50 timed steps, as in the paper."""


SKETCH = 512
"""Width of the sketched gradients, as in the paper."""
WIDTH, EPOCHS, LEARNING_RATE = 128, 200, 3e-3
"""Network of two hidden layers, for hundreds of labels (the paper's has three of 512)."""


class BmdalLcmd:
    """LCMD-TP as `bmdal-reg` computes it, on sketched gradients of a trained network.

    Holzmueller et al. 2023, "A Framework and Benchmark for Deep Batch Active Learning for
    Regression". It begins with a random draw.
    """

    name = "bmdal-lcmd-gradients"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        """Choose a batch; `check_installed` has looked for `bmdal-reg`.

        Raises:
            InputError: Values of labels are missing.
        """
        if not len(request.known):
            return RandomChoice().select(request)
        if not request.count:
            return []
        from bmdal_reg.bmdal.algorithms import select_batch
        from bmdal_reg.bmdal.feature_data import TensorFeatureData

        if not hasattr(np, "Inf"):  # bmdal-reg 3.0.2 uses a name removed in NumPy 2
            np.Inf = np.inf  # type: ignore[attr-defined]
        points = torch.from_numpy(request.points)
        with seed_torch(request.generator):
            chosen, _ = select_batch(
                batch_size=request.count,
                models=[_network(points, request)],
                data={
                    "train": TensorFeatureData(points[request.known]),
                    "pool": TensorFeatureData(points[request.open]),
                },
                y_train=None,
                base_kernel="grad",
                kernel_transforms=[("rp", [SKETCH])],
                selection_method="lcmd",
                sel_with_train=True,
            )
        return explain_picks(request, request.open[chosen.numpy()].tolist())


def _network(points: torch.Tensor, request: AcquisitionRequest) -> nn.Module:
    """Train a network on the standardized logarithms of the labels."""
    if not isinstance(request, ReplayRequest) or request.log_values is None:
        raise InputError("the network of bmdal-reg needs the values of the labels")
    known = np.isfinite(request.log_values)
    rows = torch.from_numpy(request.labelled[known])
    values = torch.from_numpy(request.log_values[known]).float()
    values = (values - values.mean()) / values.std().clamp(min=1e-6)
    with seed_torch(request.generator):
        network = nn.Sequential(
            nn.Linear(points.shape[1], WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )
        optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            loss = ((network(points[rows])[:, 0] - values) ** 2).mean()
            loss.backward()
            optimizer.step()
    return network


JUDGED: tuple[Strategy, ...] = (*STUDIED, BmdalLcmd())
"""Strategies that are evaluated in addition to those of a campaign."""


NEED_PREDICTIONS = frozenset({"ours", "ours-per-second", "uncertainty", "variance"})
"""Strategies that use predictions of failures, step times or uncertainty of the pool."""


def check_installed(strategies: Collection[str]) -> None:
    """Raise InputError if a strategy needs `bmdal-reg` and it is not installed."""
    if BmdalLcmd.name in strategies and find_spec("bmdal_reg") is None:
        raise InputError(
            f"{BmdalLcmd.name} needs bmdal-reg, which is not installed; leave it out, or install "
            "it with: pip install bmdal-reg"
        )


def named_strategy(name: str) -> Strategy:
    """Return a strategy by its name, including those only available in replays.

    Raises:
        InputError: The name is unknown.
    """
    for strategy in JUDGED:
        if strategy.name == name:
            return strategy
    if name not in STRATEGIES:
        known = [*STRATEGIES, *(strategy.name for strategy in JUDGED)]
        raise InputError(f"no acquisition strategy {name!r}; {nearest(name, known)}")
    return strategy_named(name)


@dataclass(frozen=True)
class ReplayPoint:
    """Errors and costs of a replayed campaign after one round."""

    labels: int
    mape: float
    """MAPE in percent on held-out architectures."""
    median_ape: float
    seconds: float | None
    """Total step time measured so far, including warm-up; None for labels other than times."""
    died: int
    """Number of acquired labels of runs that ran out of memory."""


@dataclass(frozen=True, eq=False)
class Bench:
    """Data shared by all campaigns of a comparison."""

    samples: Samples
    embeddings: npt.NDArray[np.float32]
    """Embeddings of the samples' graphs by an encoder trained without labels, (n, width)."""
    metric: str
    """Column of the metric."""
    spec: DeviceSpec | None
    estimator: Estimator
    """Learner to evaluate."""

    @property
    def times(self) -> bool:
        """Return True if the labels are step times, which give the cost of a measurement."""
        return self.metric == "step_time_ms"

    @property
    def capacity(self) -> float | None:
        """Return the memory at which runs ran out of memory; None without such runs."""
        above = self.samples.above[~np.isnan(self.samples.above)]
        return float(np.median(above)) if len(above) else None


def replay(bench: Bench, strategy: str, seed: int, budgets: Sequence[int]) -> Iterator[ReplayPoint]:
    """Run one campaign and yield a point after each budget.

    Raises:
        InputError: The pool has fewer labels than the largest budget, or there is no such
            strategy; or no held-out label has a value.
    """
    samples, chooser = bench.samples, named_strategy(strategy)
    held_out = split_architectures(
        samples.configurations, TEST_SHARE, np.random.default_rng(seed), samples.groups
    )
    test = np.array([name in held_out for name in samples.architectures])
    pool = np.flatnonzero(~test)
    if len(pool) < max(budgets):
        raise InputError(f"cannot acquire {max(budgets)} labels from a pool of {len(pool)}")
    if not (test & samples.judged & ~np.isnan(samples.values)).any():
        raise InputError(f"seed {seed} holds out no label with a usable value; add more labels")
    view = _View(bench, pool)
    labelled = np.zeros(0, dtype=np.int64)
    for budget in budgets:
        generator = np.random.default_rng([seed, budget])
        request = view.request(labelled, budget, generator, strategy)
        picks = (chooser if len(labelled) else cold_start(chooser)).select(request)
        labelled = np.concatenate([labelled, [pick.index for pick in picks]]).astype(np.int64)
        rows = pool[labelled]
        view.model = bench.estimator.fit(
            samples.at(rows), samples.targets(rows), np.random.default_rng([seed, budget, 1])
        )
        yield _point(bench, rows, view.model.predict(samples.at(np.flatnonzero(test))), test)


class _View:
    """Information about the pool for a strategy, as in a campaign."""

    def __init__(self, bench: Bench, pool: IntArray) -> None:
        self._bench = bench
        self._pool = pool
        self._workloads = bench.samples.at(pool)
        self._families = bench.samples.families[pool].tolist()
        self._static = np.stack([w.static_features for w in self._workloads])
        self._knowledge = PoolKnowledge.of(
            self._workloads, [bench.metric], bench.spec, np.random.default_rng(0)
        )
        self.model: Model | None = None
        """Return the learner fitted after the last round."""

    def request(
        self, labelled: IntArray, budget: int, generator: np.random.Generator, strategy: str
    ) -> ReplayRequest:
        """Return the next request, with predictions of the pool only if needed."""
        capacity, estimate = self._bench.capacity, self._knowledge.estimates.get(self._bench.metric)
        gradients = uncertainty = None
        if strategy == Lcmd.name and self.model is not None:
            gradients = gradients_of(self.model, self._workloads)
        if strategy in NEED_PREDICTIONS and self.model is not None:
            own = self.model.predict(self._workloads)
            uncertainty = own.log_std_of_mean
            if estimate is not None:  # use the first estimate until the learner has a deviation
                log_std = estimate.log_std if own.log_std is None else own.log_std
                estimate = Estimate(own.median, log_std=log_std)
        values = self._bench.samples.values[self._pool[labelled]]
        return ReplayRequest(
            embeddings=self._bench.embeddings[self._pool],
            static_features=self._static,
            labelled=labelled,
            candidates=np.arange(len(self._pool)),
            count=budget - len(labelled),
            generator=generator,
            families=self._families,
            covariances=[*self._knowledge.covariances.values()],
            gradients=gradients,
            log_values=np.log(values),
            uncertainty=uncertainty,
            predicted_cost=estimate.median if estimate and self._bench.times else None,
            failure=probability_above(estimate, capacity) if estimate and capacity else None,
        )


def _point(
    bench: Bench, rows: IntArray, estimate: Estimate, test: npt.NDArray[np.bool_]
) -> ReplayPoint:
    samples = bench.samples
    values = samples.values[test]
    judged = samples.judged[test] & ~np.isnan(values)
    errors = 100.0 * np.abs(estimate.median[judged] / values[judged] - 1.0)
    spent = samples.values[rows]
    return ReplayPoint(
        labels=len(rows),
        mape=float(errors.mean()),
        median_ape=float(np.median(errors)),
        seconds=float(np.nansum(spent)) * STEPS / 1e3 if bench.times else None,
        died=int(np.isnan(spent).sum()),
    )
