"""Baselines without a graph network: regression on features of whole graphs, and simulations.

The paper compares TraPPM with a multilayer perceptron and with gradient boosting on batch size,
nodes, edges, MACs, parameters and memory. Both learn the logarithm of the metric from logarithms of
the features, with scikit-learn and XGBoost (Chen and Guestrin 2016).

The physics baseline is TraPPM's head without its residual. FakeTensor sums parameters and
activations in fp32 without the driver's context, so its error is 45 % on an A100. A fair baseline
is the line memory = c0 + c1 * estimate, fitted by least absolute relative error (robust to spikes).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from research.held_out import Array, robust_line
from trappm.learner.interface import Estimate, Model, Targets, Workload
from trappm.learner.paper.graphs import Scaler, log_static_features
from trappm.learner.paper.regressor import MIN_LABELS, select_labelled
from trappm.learner.physics.prior import Prior
from trappm.profiler.errors import InputError


@dataclass(frozen=True, eq=False)
class FittedBaseline:
    """A trained baseline."""

    predict: Callable[[Sequence[Workload]], Estimate]


@dataclass(frozen=True, eq=False)
class TabularEstimator:
    """Regression with `fit` and `predict`, created again for each training."""

    name: str
    regression: Callable[[int], Any]
    """Factory of regressors by random seed."""
    least_labels: ClassVar[int] = MIN_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> FittedBaseline:
        """Fit as `learner.interface.Estimator`; raises InputError if a start is given."""
        if start is not None:
            raise InputError(f"{self.name} cannot start from the weights of another device")
        rows, logs = select_labelled(workloads, targets)
        chosen = [workloads[i] for i in rows]
        features = log_static_features(chosen)
        scaler = Scaler.fit(features)
        centre, scale = float(logs.mean()), max(float(logs.std()), 0.02)
        regression = self.regression(int(generator.integers(2**31)))
        with warnings.catch_warnings():
            # The number of rounds is fixed, regardless of convergence.
            warnings.filterwarnings("ignore", message="Stochastic Optimizer: Maximum iterations")
            regression.fit(scaler.apply(features), (logs - centre) / scale)

        def predict(workloads: Sequence[Workload]) -> Estimate:
            if len(workloads) == 0:
                return Estimate(np.zeros(0))
            units = regression.predict(scaler.apply(log_static_features(workloads)))
            return Estimate(np.exp(centre + scale * np.asarray(units, dtype=np.float64)))

        return FittedBaseline(predict)


def mlp() -> TabularEstimator:
    return TabularEstimator("mlp", _perceptron)


@dataclass(frozen=True, kw_only=True)
class Boosting:
    """Settings of XGBoost, found by a study on the A100's memory (docs/research/accuracy.md)."""

    n_estimators: int = 1500
    max_depth: int = 8
    learning_rate: float = 0.0175
    subsample: float = 0.5


def xgboost(settings: Boosting = Boosting()) -> TabularEstimator:
    return TabularEstimator("xgboost", partial(_boosting, settings))


def _perceptron(seed: int) -> Any:
    from sklearn.neural_network import MLPRegressor

    # Early stopping would use single rows as validation, with near-copies in training.
    return MLPRegressor(
        hidden_layer_sizes=(128, 128), alpha=1e-3, max_iter=200, tol=0.0, random_state=seed
    )


def _boosting(settings: Boosting, seed: int) -> Any:
    from xgboost import XGBRegressor

    return XGBRegressor(**asdict(settings), random_state=seed, n_jobs=1)


FLOOR = 1e-4
"""Smallest relative error that weights of FakeTensor's line are divided by."""


@dataclass(frozen=True, eq=False)
class PriorModel:
    """A prior with fitted constants."""

    prior: Prior

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        return Estimate(np.exp(self.prior.log_values(workloads)))


@dataclass(frozen=True, eq=False)
class PriorAlone:
    """Fit of a prior's constants and nothing else; it needs no labels."""

    prior: Prior
    name: str = "prior"

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> PriorModel:
        """Fit as `learner.interface.Estimator`; from another device's constants with a start.

        Raises:
            InputError: The start is of another method.
        """
        if start is not None and not isinstance(start, PriorModel):
            raise InputError(f"{self.name} cannot start from a {type(start).__name__}")
        centre = self.prior if start is None else self.prior.started_from(start.prior)
        fitted = centre.refit(
            workloads,
            np.log(targets.values),
            log_above=np.log(targets.above),
            tightness=1.0 if start is None else centre.transfer_tightness,
        )
        return PriorModel(fitted)


@dataclass(frozen=True, eq=False)
class FakeTensor:
    """Fit of the line to FakeTensor's estimate of each workload."""

    estimates_mib: Mapping[Workload, float]
    name: str = "faketensor"
    least_labels: ClassVar[int] = MIN_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> FittedBaseline:
        """Fit as `learner.interface.Estimator`; two coefficients need no start.

        Raises:
            InputError: There are too few labels, or a workload has no estimate.
        """
        rows, logs = select_labelled(workloads, targets)
        estimates = _column(self.estimates_mib, [workloads[i] for i in rows])
        offset, factor = robust_line(estimates, np.exp(logs), FLOOR)
        return FittedBaseline(
            lambda some: Estimate(offset + factor * _column(self.estimates_mib, some))
        )


def _column(estimates_mib: Mapping[Workload, float], workloads: Sequence[Workload]) -> Array:
    try:
        return np.array([estimates_mib[workload] for workload in workloads], dtype=np.float64)
    except KeyError as error:
        raise InputError(
            "faketensor needs FakeTensor's estimate of every label; GPUMemNet's sheet has them"
        ) from error
