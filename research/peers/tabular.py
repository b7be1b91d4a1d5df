"""Regression on features of whole graphs: what a graph network must beat to be worth it.

TraPPM compares itself with a multilayer perceptron and with gradient boosting on batch size, nodes,
edges, MACs, parameters and memory. Both learn the logarithm of the metric here, from logarithms of
the features. scikit-learn and XGBoost (Chen and Guestrin 2016) do the work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.paper.graphs import Scaler, log_static_features
from trappm.learner.paper.regressor import LEAST_LABELS, labelled
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TabularModel:
    """A fitted regression with the scales of its inputs and output."""

    regression: Any
    scaler: Scaler
    centre: float
    scale: float

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        if len(workloads) == 0:
            return Estimate(np.zeros(0))
        features = self.scaler.apply(log_static_features(workloads))
        units = np.asarray(self.regression.predict(features), dtype=np.float64)
        return Estimate(np.exp(self.centre + self.scale * units))


@dataclass(frozen=True, eq=False)
class TabularEstimator:
    """Any regression with `fit` and `predict`, made anew for each training."""

    name: str
    regression: Callable[[int], Any]
    """Makes one that draws from this seed."""
    least_labels: ClassVar[int] = LEAST_LABELS

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> TabularModel:
        """As `learner.estimator.Estimator`; it has no weights to start from."""
        if start is not None:
            raise InputError(f"{self.name} cannot start from the weights of another device")
        rows, values = labelled(workloads, targets)
        chosen = [workloads[i] for i in rows]
        features = log_static_features(chosen)
        scaler, logs = Scaler.fit(features), np.log(values)
        centre, scale = float(logs.mean()), max(float(logs.std()), 0.02)
        regression = self.regression(int(generator.integers(2**31)))
        with warnings.catch_warnings():
            # So many rounds are what it gets, converged or not.
            warnings.filterwarnings("ignore", message="Stochastic Optimizer: Maximum iterations")
            regression.fit(scaler.apply(features), (logs - centre) / scale)
        return TabularModel(regression, scaler, centre, scale)


def mlp() -> TabularEstimator:
    return TabularEstimator("mlp", _perceptron)


@dataclass(frozen=True, kw_only=True)
class Boosting:
    """Settings of XGBoost, found by a study on the A100's memory (docs/studies/networks.md)."""

    n_estimators: int = 1500
    max_depth: int = 8
    learning_rate: float = 0.0175
    subsample: float = 0.5


def xgboost(settings: Boosting = Boosting()) -> TabularEstimator:
    return TabularEstimator("xgboost", partial(_boosting, settings))


def _perceptron(seed: int) -> Any:
    from sklearn.neural_network import MLPRegressor

    # Its early stopping would judge by single rows, which have near-copies in training.
    return MLPRegressor(
        hidden_layer_sizes=(128, 128), alpha=1e-3, max_iter=200, tol=0.0, random_state=seed
    )


def _boosting(settings: Boosting, seed: int) -> Any:
    from xgboost import XGBRegressor

    return XGBRegressor(**asdict(settings), random_state=seed, n_jobs=1)
