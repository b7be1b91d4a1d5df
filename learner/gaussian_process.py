"""The Gaussian process that explains what a prior leaves: sparse, robust, with censored labels.

Notation:

    X, Z     points of the n labels and of the m landmarks, scaled features (n, c) and (m, c)
    y        labels in units of their robust deviation (n)
    k        covariance: a^2 Matern-3/2 over relevance * x, plus b^2 x.x', plus c^2
    L        lower Cholesky factor of k(Z, Z)
    phi(x)   L^-1 k(Z, x), features with phi(x).phi(x') = k(x, x') at the landmarks (m)
    w        weights of f(x) = phi(x).w, standard normal before any label (m)
    W        diagonal precision of the labels' noise
    A        I + Phi^T W Phi, the posterior precision of w, with mean A^-1 Phi^T W y

Up to `LANDMARKS` labels Z = X and the process is exact. Beyond, phi are Nystroem features (Williams
and Seeger 2001), and the variance that they miss is added to predictions, as in FITC (Snelson and
Ghahramani 2006). Noise is Student-t by reweighting (Tipping and Lawrence 2005): W follows from the
expected squared errors. A run out of memory is a lower bound with a Tobit likelihood (Tobin 1958).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.interface import Array, FloatArray, IntArray
from trappm.learner.stats.student_t import (
    DEGREES_OF_FREEDOM,
    losses,
    precisions,
    robust_deviation,
)

Float = TypeVar("Float", np.float32, np.float64)

CLIP = 5.0
"""Largest distance of a feature from the training mean in standard deviations (round number)."""
LANDMARKS = 512
"""Largest number of landmarks: a fit takes the cube of it."""
JITTER = 1e-8
"""Added to the diagonal of k(Z, Z), relative to its mean."""
ITERATIONS, TUNING_ITERATIONS = 8, 3
"""Reweighting steps of a fit, and of each fit that compares covariances."""
TUNING_ROWS = 300
"""Labels that the covariance is chosen on; more take time and change little."""
ROWS_AT_ONCE = 4096
"""Bounds the memory of one product."""
MIN_NOISE = 0.003
"""Least noise of the logarithm: repeated step times of busy GPUs differ by about this much
(0.34 % in the median of five pairs on H100s, docs/research/measurement.md)."""
PSEUDO_LABELS = 2.0
"""Weight of the previous noise scale in an update, as a number of labels."""

# Coordinate descent chooses the covariance among steps of about a factor of two.
SMOOTH_TRIED = (0.35, 0.7, 1.4)
LINEAR_TRIED = (0.0, 0.15, 0.3, 0.8)
RELEVANCES_TRIED = (0.1, 0.3, 1.0, 2.0)
FIRST_RELEVANCE = 0.5
SWEEPS = 2
CAUTION = 1.0
"""Nats that another covariance must gain over the current one."""


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Map from features to points: columns are scaled in groups of mean squared norm 1."""

    middle: Array
    scale: Array
    groups: tuple[int, ...]
    """Number of columns of each group, in order."""

    @classmethod
    def fit(cls, features: Array, groups: Sequence[int]) -> Self:
        """Fit the scale to features (n, f)."""
        middle = features.mean(axis=0) if len(features) else np.zeros(features.shape[1])
        deviation = features.std(axis=0) if len(features) else np.zeros(features.shape[1])
        # A constant column is left out: other values there must not move predictions.
        scale = np.where(deviation < 1e-9, np.inf, deviation * _group_norms(groups))
        return cls(middle, scale, tuple(groups))

    def apply(self, features: Array) -> Array:
        """Return the points of features (n, f)."""
        bound = CLIP / _group_norms(self.groups)
        scaled: Array = np.clip((features - self.middle) / self.scale, -bound, bound)
        return scaled


def _group_norms(groups: Sequence[int]) -> Array:
    """Return each column's norm of its group when all its columns have deviation 1 (f)."""
    return np.repeat(np.sqrt(np.maximum(groups, 1)), groups)


def pairwise(points: npt.NDArray[Float], others: npt.NDArray[Float]) -> npt.NDArray[Float]:
    """Return the squared distances of points (n, c) and (m, c): (n, m)."""
    squares = (points**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)[None, :]
    apart: npt.NDArray[Float] = np.maximum(squares - 2.0 * points @ others.T, 0.0)
    return apart


def matern32(first: npt.NDArray[Float], second: npt.NDArray[Float]) -> npt.NDArray[Float]:
    """Return the Matern-3/2 covariance of points (n, c) and (m, c), unit variance and length."""
    distance: npt.NDArray[Any] = np.sqrt(3.0 * pairwise(first, second))
    covariance: npt.NDArray[Float] = ((1.0 + distance) * np.exp(-distance)).astype(first.dtype)
    return covariance


def nystroem_root(covariance: Array, least_share: float = 1e-9) -> Array:
    """Return a root (m, p) of the pseudo-inverse of the landmarks' covariance (m, m).

    `k(x, Z) @ root` are features whose inner products are covariances. Directions with less than
    `least_share` of the largest eigenvalue are left out.
    """
    values, vectors = np.linalg.eigh(covariance)
    keep = values > least_share * max(float(values[-1]), 1e-12)
    root: Array = vectors[:, keep] / np.sqrt(values[keep])
    return root


@dataclass(frozen=True)
class Covariance:
    """Hyperparameters of k, in units of the labels' robust deviation."""

    relevance: tuple[float, ...]
    """Inverse length scale of each group of features."""
    smooth: float = 0.7
    """Deviation a of the Matern part."""
    linear: float = 0.3
    """Deviation b of the linear part."""
    level: float = 0.3
    """Deviation c of the constant part."""
    noise: float = 0.5
    """Scale of the Student-t noise that reweighting starts from."""

    def between(self, first: Array, second: Array, groups: Sequence[int]) -> Array:
        """Return k of points (n, c) and (m, c): (n, m)."""
        relevance = np.repeat(self.relevance, groups)
        smooth = matern32(first * relevance, second * relevance)
        summed: Array = self.smooth**2 * smooth + self.linear**2 * (first @ second.T)
        return summed + self.level**2

    def variances(self, points: Array) -> Array:
        """Return k of each point (n, c) with itself (n)."""
        squares: Array = (points**2).sum(axis=1)
        return self.smooth**2 + self.linear**2 * squares + self.level**2


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """Posterior of a fitted process."""

    coordinates: Coordinates
    covariance: Covariance
    unit: float
    """Robust deviation of the labels, which they were divided by."""
    landmarks: FloatArray
    """Z (m, c)."""
    mean: Array
    """Mean of w (m)."""
    explained: FloatArray
    """I - A^-1: the share of the variance of w that labels remove (m, m). Its eigenvalues lie
    between 0 and 1, so single precision is enough."""
    noise: float
    """Scale of the Student-t noise, in units of `unit`."""

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return mean (n) and deviation without noise (n) for features (n, f)."""
        points = self.coordinates.apply(features)
        groups = self.coordinates.groups
        phi = _features(points, self.landmarks, self._factor, self.covariance, groups)
        removed = ((phi @ self.explained) * phi).sum(axis=1)
        variance = np.maximum(self.covariance.variances(points) - removed, 0.0)
        return self.unit * (phi @ self.mean), self.unit * np.sqrt(variance)

    @cached_property
    def _factor(self) -> Array:
        """L (m, m)."""
        return _landmark_factor(self.landmarks, self.covariance, self.coordinates.groups)

    def tensors(self) -> dict[str, Tensor]:
        c = self.covariance
        arrays = {
            "middle": self.coordinates.middle,
            "scale": self.coordinates.scale,
            "groups": np.array(self.coordinates.groups, dtype=np.int64),
            "relevance": np.array(c.relevance),
            "constants": np.array([c.smooth, c.linear, c.level, c.noise, self.unit, self.noise]),
            "landmarks": self.landmarks,
            "mean": self.mean,
            "explained": self.explained[np.triu_indices(len(self.explained))],
        }
        return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the process that `tensors` describes.

        Raises:
            KeyError, ValueError: The tensors are not those of a process.
        """
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        groups = tuple(int(g) for g in arrays["groups"])
        smooth, linear, level, noise, unit, fitted_noise = (float(v) for v in arrays["constants"])
        count, columns = arrays["landmarks"].shape
        fits = (
            sum(groups) == columns == len(arrays["middle"]) == len(arrays["scale"])
            and len(arrays["relevance"]) == len(groups)
            and arrays["mean"].shape == (count,)
            and arrays["explained"].shape == (count * (count + 1) // 2,)
        )
        if not fits:
            raise ValueError("the tensors of a Gaussian process do not fit together")
        explained = np.zeros((count, count), dtype=np.float32)
        upper = np.triu_indices(count)
        explained[upper] = explained.T[upper] = arrays["explained"]
        return cls(
            Coordinates(arrays["middle"], arrays["scale"], groups),
            Covariance(tuple(arrays["relevance"].tolist()), smooth, linear, level, noise),
            unit,
            arrays["landmarks"],
            arrays["mean"],
            explained,
            fitted_noise,
        )


@dataclass(frozen=True, eq=False)
class FoldPredictions:
    """Out-of-fold predictions of n labels."""

    mean: Array
    """(n)."""
    deviation: Array
    """Deviation without noise (n)."""


def fit_process(
    features: Array,
    values: Array,
    groups: Sequence[int],
    folds: IntArray,
    generator: np.random.Generator,
    bounds: Array | None = None,
    label_errors: Array | None = None,
) -> tuple[GaussianProcess, FoldPredictions]:
    """Fit a process to n labels, and once more without each fold.

    Args:
        features: Finite features, shape (n, f).
        values: Values to explain (n); NaN where only a bound is known.
        groups: Number of columns of each group of features.
        folds: Fold of each label (n); the covariance is chosen by out-of-fold predictions.
        generator: Draws the landmarks, and the labels that the covariance is chosen on.
        bounds: Lower bounds of the values that are not known (n), NaN elsewhere.
        label_errors: Standard errors of the values, in addition to the noise (n; default: 0).

    Returns:
        The process, and its out-of-fold predictions.
    """
    known = np.flatnonzero(~np.isnan(values))
    unit = max(robust_deviation(values[known]), MIN_NOISE)
    coordinates = Coordinates.fit(features, groups)
    points = coordinates.apply(features)
    bounds = np.full(len(values), np.nan) if bounds is None else bounds
    errors = np.zeros(len(values)) if label_errors is None else label_errors / unit
    labels = _ScaledLabels(values / unit, bounds / unit, errors, MIN_NOISE / unit)
    rows = np.sort(generator.permutation(known)[:TUNING_ROWS])
    covariance = _choose(points[rows], labels.at(rows), folds[rows], coordinates.groups)
    chosen = np.sort(generator.permutation(len(values))[:LANDMARKS])
    landmarks = np.unique(points[chosen].astype(np.float32), axis=0)
    factor = _landmark_factor(landmarks, covariance, coordinates.groups)
    phi = _features(points, landmarks, factor, covariance, coordinates.groups)
    missed = np.maximum(covariance.variances(points) - (phi**2).sum(axis=1), 0.0)
    unseen, _ = _out_of_fold(phi, labels, folds, covariance.noise, missed, ITERATIONS)
    posterior = _posterior(phi, labels, covariance.noise, ITERATIONS)
    root = posterior.root
    process = GaussianProcess(
        coordinates,
        covariance,
        unit,
        landmarks,
        posterior.mean,
        (np.eye(len(root)) - root.T @ root).astype(np.float32),
        posterior.noise,
    )
    return process, FoldPredictions(unit * unseen.mean, unit * unseen.deviation)


def _landmark_factor(landmarks: FloatArray, covariance: Covariance, groups: Sequence[int]) -> Array:
    """Return L (m, m)."""
    wide = landmarks.astype(np.float64)
    return _factor(covariance.between(wide, wide, groups))


def _factor(matrix: Array) -> Array:
    """Return the lower Cholesky factor of a covariance (m, m), with jitter."""
    jitter = JITTER * float(np.trace(matrix)) / max(len(matrix), 1)
    factor = np.linalg.cholesky(matrix + jitter * np.eye(len(matrix)))
    return np.asarray(factor, dtype=np.float64)


def _solve(factor: npt.NDArray[Any], right: Array) -> Array:
    """Return X with `factor @ X = right` for a lower triangular factor (m, m) and (m, n).

    Not by scipy, whose import takes a tenth of the time of a prediction.
    """
    solution = torch.linalg.solve_triangular(
        torch.from_numpy(factor), torch.from_numpy(right), upper=False
    )
    return np.asarray(solution.numpy())


def _features(
    points: Array,
    landmarks: FloatArray,
    factor: Array,
    covariance: Covariance,
    groups: Sequence[int],
) -> Array:
    """Return phi of points (n, c): (n, m)."""
    cross = covariance.between(landmarks.astype(np.float64), points, groups)
    return _solve(factor, cross).T


@dataclass(frozen=True, eq=False)
class _ScaledLabels:
    """Labels in units of their robust deviation."""

    values: Array
    """(n); NaN where only a bound is known."""
    bounds: Array
    """Lower bounds (n); NaN where the value is known."""
    errors: Array
    """Standard errors of the values (n)."""
    least_noise: float

    def at(self, rows: npt.NDArray[Any]) -> _ScaledLabels:
        return replace(
            self, values=self.values[rows], bounds=self.bounds[rows], errors=self.errors[rows]
        )


@dataclass(frozen=True, eq=False)
class _Posterior:
    """Posterior of the weights w."""

    mean: Array
    """(m)."""
    root: Array
    """R with R^T R = A^-1 (m, m)."""
    noise: float


def _posterior(phi: Array, labels: _ScaledLabels, noise: float, iterations: int) -> _Posterior:
    """Return the posterior of w, with Student-t noise by reweighting from the scale `noise`.

    Not `map_fit`: expected squares have the posterior variance of w, which it does not compute.
    """
    known = ~np.isnan(labels.values)
    fitted, squares = np.zeros(len(phi)), np.zeros(len(phi))
    precision = np.full(len(phi), 1.0 / noise**2)
    chunks = [slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, len(phi), ROWS_AT_ONCE)]
    for _ in range(iterations):
        targets, pull = _tobit(labels.bounds, fitted, noise)
        targets = np.where(known, labels.values, targets)
        weight = np.where(known, precision / (1.0 + precision * labels.errors**2), pull)
        a: Array = np.eye(phi.shape[1])
        for rows in chunks:
            weighted = phi[rows] * np.sqrt(weight[rows])[:, None]
            a = a + weighted.T @ weighted
        root = _solve(np.linalg.cholesky(a), np.eye(len(a)))
        mean: Array = root.T @ (root @ (phi.T @ (weight * targets)))
        fitted = phi @ mean
        # The expected square of an error includes the variance of the fitted value.
        unsure = [((phi[rows] @ root.T) ** 2).sum(axis=1) for rows in chunks]
        squares = (targets - fitted) ** 2 + np.concatenate(unsure)
        # A label's own error is no noise of the process.
        squares = squares / (1.0 + precision * labels.errors**2)
        noise = _update_scale(squares[known], noise, labels.least_noise)
        precision = precisions(squares, noise)
    return _Posterior(mean, root, noise)


def _update_scale(squares: Array, scale: float, least: float) -> float:
    """Return the next scale of Student-t noise, from expected squared errors (n)."""
    weights = precisions(squares, scale) * scale**2
    total = float((weights * squares).sum()) + PSEUDO_LABELS * scale**2
    return max(float(np.sqrt(total / (len(squares) + PSEUDO_LABELS))), least)


def _tobit(bounds: Array, means: Array, noise: float) -> tuple[Array, Array]:
    """Return the label (n) and its precision (n) that act like "the value exceeds the bound".

    The second-order expansion of log P(value > bound) around the mean, with the weight of a
    Student-t error for labels far below their bound. NaN where the bound is NaN.
    """
    from scipy.special import log_ndtr  # type: ignore[import-untyped]

    gap = (bounds - means) / noise
    hazard = np.exp(-0.5 * gap**2 - 0.5 * np.log(2.0 * np.pi) - log_ndtr(-gap))
    curvature = np.maximum(hazard * (hazard - gap), 1e-12)
    degrees = DEGREES_OF_FREEDOM
    trust = (degrees + 1.0) / (degrees + 1.0 + np.maximum(gap, 0.0) ** 2)
    return means + noise * hazard / curvature, trust * curvature / noise**2


def _out_of_fold(
    phi: Array, labels: _ScaledLabels, folds: IntArray, noise: float, missed: Array, iterations: int
) -> tuple[FoldPredictions, Array]:
    """Predict each fold without it; return the predictions and the noise scale of each label (n).

    `missed` is the variance that the features lack (n).
    """
    mean, deviation, scale = (np.zeros(len(folds)) for _ in range(3))
    for fold in np.unique(folds):
        out = folds == fold
        posterior = _posterior(phi[~out], labels.at(~out), noise, iterations)
        mean[out], scale[out] = phi[out] @ posterior.mean, posterior.noise
        deviation[out] = np.sqrt(((phi[out] @ posterior.root.T) ** 2).sum(axis=1) + missed[out])
    return FoldPredictions(mean, deviation), scale


def _choose(
    points: Array, labels: _ScaledLabels, folds: IntArray, groups: Sequence[int]
) -> Covariance:
    """Return the covariance with the most probable out-of-fold predictions of known labels (n)."""

    def loss(at: Covariance) -> float:
        phi = _factor(at.between(points, points, groups))
        unseen, scale = _out_of_fold(
            phi, labels, folds, at.noise, np.zeros(len(phi)), TUNING_ITERATIONS
        )
        deviation = np.hypot(np.hypot(unseen.deviation, scale), labels.errors)
        return float(losses(labels.values - unseen.mean, deviation).sum())

    best = Covariance(relevance=(FIRST_RELEVANCE,) * len(groups))
    least = loss(best)
    for _ in range(SWEEPS):
        before = best
        for part in ("smooth", "linear", *range(len(groups))):
            for candidate in _variants(best, part):
                new = loss(candidate)
                if new < least - CAUTION:
                    best, least = candidate, new
        if best == before:
            break
    return best


def _variants(at: Covariance, part: str | int) -> Iterator[Covariance]:
    """Yield covariances that differ in one part's deviation, or in one group's relevance."""
    if part == "smooth":
        yield from (replace(at, smooth=value) for value in SMOOTH_TRIED)
    elif part == "linear":
        yield from (replace(at, linear=value) for value in LINEAR_TRIED)
    else:
        number = int(part)
        for value in RELEVANCES_TRIED:
            relevance = (*at.relevance[:number], value, *at.relevance[number + 1 :])
            yield replace(at, relevance=relevance)
