"""The quick learner: prior and residual as one Gaussian process, for few labels.

    log value = prior(constants) + residual,   covariance = J J^T + Matern 3/2 over groups

J is how far the prior moves with each of its constants, in units of how uncertain that one is
(`Prior.sensitivities`), so constants and residual are learned together, without folds: Gauss-Newton
steps (the prior is linearised anew around its constants), and Student-t noise by reweighting. The
residual stands on the features of the prior's groups; its amplitude and the lengths are chosen by
the evidence.

At many labels `learner.heads.metric_head` is more accurate; this one fits hundreds of times in a
bench, and its covariance is what acquisition reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from trappm.learner.acquisition.pool_covariance import FloatArray, PoolCovariance, narrow
from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.gaussian_process import (
    PSEUDO_LABELS,
    Coordinates,
    matern32,
    nystroem_root,
)
from trappm.learner.physics.prior import Prior
from trappm.learner.stats.calibration import COVERAGE
from trappm.learner.stats.student_t import DEGREES_OF_FREEDOM, losses, precisions
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]

# Grids and steps were chosen on splits of the published sheets by seeds 100 to 119, which no table
# judges by (docs/studies/choosing.md); `python -m research replay --first-seed 100` runs on them.
RELEVANCES = (0.12, 0.25, 0.5)
"""Inverse lengths that are tried, where each group has a mean squared norm of 1."""
AMPLITUDES = (0.03, 0.08, 0.16, 0.3)
"""Deviations of the residual that are tried, in the logarithm."""
LINEAR_SHARE = 0.4
"""Deviation of the residual's linear part over that of its smooth part."""
FIRST_NOISE = 0.08
"""Deviation of an error before any label: the second of `AMPLITUDES`; labels soon replace it."""
LEAST_NOISE = 0.004
"""About what steps differ by when they are repeated, as in `learner.gaussian_process`."""
LINEARISATIONS = 3
REWEIGHTINGS = 6
"""Round numbers: each more costs another solution of the whole."""
MOST_STEP = 1.0
"""Spreads that a constant moves at most between two linearisations."""
LANDMARKS = 256
"""Landmarks of a pool."""
GAMMA_NODES = 60
"""Of the quadrature over precisions, which is then right to three digits."""


def fitted_scale(squares: Array, scale: float, *, guess: float, lowest: float) -> float:
    """The scale of Student-t errors, one step on from `scale`, from expected squares (n)."""
    weights = precisions(squares, scale) * scale**2
    total = float((weights * squares).sum()) + PSEUDO_LABELS * guess**2
    return max(float(np.sqrt(total / (len(squares) + PSEUDO_LABELS))), lowest)


@dataclass(frozen=True, eq=False)
class SolvedLabels:
    """A Gaussian process with Student-t noise, as n labels determine it."""

    weights: Array
    """The inverse covariance times the labels (n)."""
    factor: Array
    """Of the labels' covariance with their noise, by Cholesky: lower triangular (n, n)."""
    precision: Array
    """Of each label's noise (n)."""
    noise: float
    """Scale of the noise."""

    def explained(self, across: Array) -> Array:
        """The variance that labels take away of m points with these covariances (m, n): (m)."""
        squares: Array = (forward_solved(self.factor, across.T) ** 2).sum(axis=0)
        return squares

    def unseen(self, rows: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Errors and variances of some labels by the others alone (k) each, noise included.

        These are blocks of the inverse (Rasmussen and Williams 2006, section 5.4.2), solved from
        its factor: the k columns of it, and the block of k.
        """
        columns = forward_solved(self.factor, np.eye(len(self.factor))[:, rows])
        block = cholesky(columns.T @ columns)
        errors = backward_solved(block, forward_solved(block, self.weights[rows]))
        spread: Array = (forward_solved(block, np.eye(len(rows))) ** 2).sum(axis=0)
        return errors, spread


def solve(
    covariance: Array,
    values: Array,
    noise: float,
    *,
    steps: int,
    least_noise: float,
    guess: float | None = None,
) -> SolvedLabels:
    """The process of n labels, their noise found by reweighting.

    Args:
        covariance: of the labels without noise (n, n).
        values: the labels (n).
        noise: the scale to start from.
        steps: of reweighting; each is one factorisation.
        least_noise: a smaller scale is not believed.
        guess: of the scale, worth `PSEUDO_LABELS`; by default that of the step before.
    """
    precision = np.full(len(values), 1.0 / noise**2)
    weights, factor = values, covariance
    for _ in range(steps):
        factor = cholesky(covariance + np.diag(1.0 / precision))
        weights = backward_solved(factor, forward_solved(factor, values))
        # Errors of the fit and their variance, which is what is left of the process.
        squares = (weights / precision) ** 2
        left = np.diag(covariance) - (forward_solved(factor, covariance) ** 2).sum(axis=0)
        squares += np.maximum(left, 0.0)
        noise = fitted_scale(squares, noise, guess=guess or noise, lowest=least_noise)
        precision = precisions(squares, noise)
    return SolvedLabels(weights, factor, precision, noise)


def cholesky(matrix: Array) -> Array:
    """The lower factor of a positive definite matrix."""
    factor: Array = torch.linalg.cholesky(torch.from_numpy(matrix)).numpy()
    return factor


def forward_solved(factor: Array, right: Array) -> Array:
    """x with `factor @ x = right`, for right sides (n) or (n, m)."""
    return _triangular(factor, right, upper=False)


def backward_solved(factor: Array, right: Array) -> Array:
    """x with `factor.T @ x = right`, for right sides (n) or (n, m)."""
    return _triangular(factor.T, right, upper=True)


def _triangular(factor: Array, right: Array, *, upper: bool) -> Array:
    columns = torch.from_numpy(right if right.ndim == 2 else right[:, None])
    solved = torch.linalg.solve_triangular(torch.from_numpy(factor), columns, upper=upper)
    shaped: Array = solved.numpy().reshape(right.shape)
    return shaped


def half_widths(variances: Array, scale: float, coverage: float) -> Array:
    """Half the width of the interval that so large a share of new values lies in (n).

    A new value is a normal one of this variance (n) with a Student-t error of this scale: normal
    where the process knows little, and with heavy tails where only the error is left.
    """
    deviation = np.sqrt(variances + scale**2)
    widths: Array = deviation * np.interp((scale / deviation) ** 2, *_half_widths(coverage))
    return widths


@cache
def _half_widths(coverage: float) -> tuple[Array, Array]:
    """Of sums of variance 1 before tails, by the share of it that is the error's: (33) each."""
    shares = np.linspace(0.0, 1.0, 33)
    # A Student-t error is a normal one of a precision that is gamma distributed.
    nodes, weights = np.polynomial.laguerre.laggauss(GAMMA_NODES)
    weights = weights * nodes ** (DEGREES_OF_FREEDOM / 2 - 1)
    precision = nodes / (DEGREES_OF_FREEDOM / 2)
    deviations = torch.from_numpy(np.sqrt(1.0 - shares[:, None] + shares[:, None] / precision))
    low, high = np.full(len(shares), 0.0), np.full(len(shares), 100.0)
    for _ in range(60):
        middle = (low + high) / 2
        inside = torch.special.erf(torch.from_numpy(middle)[:, None] / (2**0.5 * deviations))
        enough = (inside.numpy() * weights).sum(axis=1) / weights.sum() > coverage
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return shares, high


@dataclass(frozen=True, eq=False)
class PoolPoints:
    """Workloads as points: the prior's features on the scale of a pool."""

    coordinates: Coordinates
    _known: WeakKeyDictionary[Workload, Array] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    @classmethod
    def of(cls, prior: Prior, workloads: Sequence[Workload]) -> PoolPoints:
        """A scale for points, fitted to the workloads of a pool; needs no labels."""
        return cls(Coordinates.fit(prior.features(workloads), prior.feature_groups))

    def points(self, prior: Prior, workloads: Sequence[Workload]) -> Array:
        """(n, c), by the prior that the scale was made with."""
        new = [w for w in workloads if w not in self._known]
        if new:
            rows = self.coordinates.apply(prior.features(new))
            self._known.update(zip(new, rows, strict=True))
        known = [self._known[w] for w in workloads]
        return np.array(known).reshape(len(known), len(self.coordinates.middle))


@dataclass(frozen=True)
class _Smooth:
    """The residual's covariance."""

    relevance: float
    amplitude: float

    def between(self, first: Array, second: Array) -> Array:
        """Of points (n, c) and (m, c): (n, m)."""
        smooth = matern32(self.relevance * first, self.relevance * second)
        return self.amplitude**2 * (smooth + LINEAR_SHARE**2 * (first @ second.T))

    def variances(self, points: Array) -> Array:
        """Of each point (n, c) with itself (n)."""
        squares: Array = (points**2).sum(axis=1)
        return self.amplitude**2 * (1.0 + LINEAR_SHARE**2 * squares)


@dataclass(frozen=True, eq=False)
class JointModel:
    """A fitted Gaussian process of prior and residual."""

    start: Prior
    """Without labels, by whose features the pool has its scale."""
    prior: Prior
    """With its constants moved; around these it is taken to be linear."""
    shift: Array
    """How much farther the constants are to move (k); the formula itself may be far from linear
    there, and its linear form is what was fitted."""
    pool: PoolPoints
    smooth: _Smooth
    labels: SolvedLabels
    points: Array
    """Of the labels (m, c)."""
    sensitivities: Array
    """Of the labels (m, k)."""

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        points = self.pool.points(self.start, workloads)
        across = self.smooth.between(points, self.points)
        moves = self.prior.sensitivities(workloads)
        middle = self.prior.log_values(workloads) + moves @ self.shift
        middle += across @ self.labels.weights
        across += moves @ self.sensitivities.T
        own = (moves**2).sum(axis=1) + self.smooth.variances(points)
        variance = np.maximum(own - self.labels.explained(across), 0.0)
        deviation = np.sqrt(variance + self.labels.noise**2)
        half_width = half_widths(variance, self.labels.noise, COVERAGE)
        return Estimate(
            median=np.exp(middle),
            low=np.exp(middle - half_width),
            high=np.exp(middle + half_width),
            log_std=deviation,
            log_std_of_mean=np.sqrt(variance),
        )

    def gradients(self, workloads: Sequence[Workload]) -> FloatArray:
        """Of the predicted logarithm by all that the process can learn (n, at most `WIDTH`)."""
        return narrow(self.covariance(workloads, np.random.default_rng(0)).features)

    def covariance(
        self, workloads: Sequence[Workload], generator: np.random.Generator
    ) -> PoolCovariance:
        """The covariance of a pool before any label, with the constants as they are now."""
        points = self.pool.points(self.start, workloads)
        chosen = np.sort(generator.permutation(len(points))[:LANDMARKS])
        root = nystroem_root(self.smooth.between(points[chosen], points[chosen]))
        smooth = self.smooth.between(points, points[chosen]) @ root
        features = np.hstack([self.prior.sensitivities(workloads), smooth])
        return PoolCovariance(features.astype(np.float32), self.labels.noise**2)


class Joint:
    """The estimator of joint models."""

    name = "joint"

    def __init__(self, prior: Prior, pool: PoolPoints) -> None:
        """With the prior without labels, and the scale of the pool, which needs none either."""
        self.prior = prior
        self.pool = pool

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> JointModel:
        """Fits a process; without labels it is that of the prior.

        Raises:
            InputError: a start, which this estimator cannot use.
        """
        if start is not None:
            raise InputError("this quick estimator starts from no other model; use ours")
        del generator  # nothing here is random
        log_values, log_above = np.log(targets.values), np.log(targets.above)
        points = self.pool.points(self.prior, workloads)
        smooth = _Smooth(RELEVANCES[-1], AMPLITUDES[1])
        start_prior = self.prior.suited(workloads, log_values)
        width = start_prior.sensitivities([]).shape[1]
        prior, moved, shift = start_prior, np.zeros(width), np.zeros(width)
        rows: list[int] = []
        moves, labels = np.zeros((0, width)), NO_LABELS
        for number in range(LINEARISATIONS if len(workloads) else 0):
            moved = moved + np.clip(shift, -MOST_STEP, MOST_STEP)
            prior = start_prior.moved(moved)
            values = prior.log_values(workloads)
            # Of a run that died only a bound is known: it pulls while the prior stays below it.
            gaps = np.where(np.isnan(log_values), log_above - values, log_values - values)
            rows = np.flatnonzero(~np.isnan(log_values) | (gaps > 0)).tolist()
            moves = prior.sensitivities([workloads[i] for i in rows])
            explained = gaps[rows] + moves @ moved
            if number == LINEARISATIONS - 1:
                groups = [targets.groups[i] for i in rows]
                smooth = _choose(labels, moves, points[rows], explained, groups)
            labels = _solve(moves, smooth.between(points[rows], points[rows]), explained)
            shift = moves.T @ labels.weights - moved
        return JointModel(
            start=self.prior,
            prior=prior,
            shift=shift,
            pool=self.pool,
            smooth=smooth,
            labels=labels,
            points=points[rows],
            sensitivities=moves,
        )


NO_LABELS = SolvedLabels(np.zeros(0), np.zeros((0, 0)), np.zeros(0), FIRST_NOISE)


def _solve(moves: Array, smooth: Array, values: Array) -> SolvedLabels:
    return solve(
        moves @ moves.T + smooth,
        values,
        FIRST_NOISE,
        steps=REWEIGHTINGS,
        least_noise=LEAST_NOISE,
        guess=FIRST_NOISE,
    )


def _choose(
    labels: SolvedLabels, moves: Array, points: Array, values: Array, groups: Sequence[str]
) -> _Smooth:
    """The residual's covariance with the most probable labels, each without its architecture.

    Labels weigh what an earlier solution (`labels`) gave them, as long as it has them all.
    """
    if len(labels.precision) != len(values):
        first = _Smooth(RELEVANCES[-1], AMPLITUDES[1])
        labels = _solve(moves, first.between(points, points), values)
    prior = moves @ moves.T + np.diag(1.0 / labels.precision)
    candidates = [_Smooth(r, a) for a in AMPLITUDES for r in RELEVANCES]
    totals = []
    for candidate in candidates:
        factor = cholesky(prior + candidate.between(points, points))
        weights = backward_solved(factor, forward_solved(factor, values))
        solved = SolvedLabels(weights, factor, labels.precision, labels.noise)
        totals.append(_unseen_loss(solved, groups))
    return candidates[int(np.argmin(totals))]


def _unseen_loss(labels: SolvedLabels, groups: Sequence[str]) -> float:
    """Negative log probability (Student-t) of each architecture's labels without them."""
    names = np.array(groups)
    total = 0.0
    for name in np.unique(names):
        own = np.flatnonzero(names == name)
        errors, spread = labels.unseen(own)
        variance = np.maximum(spread - 1.0 / labels.precision[own], 0.0)
        scale = np.sqrt(variance + labels.noise**2)
        total += float(losses(errors, scale).sum())
    return total
