"""A Gaussian process with Student-t noise, robust to wild labels: the residual at few labels.

The covariance is Matern 3/2 over groups of features, each group with a relevance of its own, and a
linear part. Noise is Student-t (`learner.stats.student_t`), since some runs surprise everybody.
Above `LANDMARKS` labels the covariance is that of Nystroem features, with the variance that they
miss added to each prediction, as in FITC (Snelson and Ghahramani 2006). Of some labels only a bound
is known (runs out of memory): they have the likelihood of lying above it (Tobin 1958), which takes
part in the same reweighting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.stats.kernels import Coordinates, matern32, nystroem_root
from trappm.learner.stats.student_t import (
    DEGREES_OF_FREEDOM,
    backward_solved,
    cholesky,
    fitted_scale,
    forward_solved,
    losses,
    precisions,
    robust_deviation,
    solve,
)

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LANDMARKS = 512
"""More labels than this are seen through so many of them: a solve takes their cube."""
ITERATIONS = 8
"""Of reweighting; each is one solve."""
ROWS_AT_ONCE = 4096
"""Labels that a solve takes together: bounds its memory, not its result."""
TUNING_ROWS = 300
"""Labels that the covariance is chosen on; more of them cost time and change little."""
TUNING_ITERATIONS = 3
"""Of reweighting while covariances are compared."""
LEAST_NOISE = 0.003
"""Of the logarithm: step times of busy GPUs differ by about this much when repeated
(0.34 % in the median of five pairs on H100s, `research/gpu_day/gpu_check.py`)."""


@dataclass(frozen=True)
class Covariance:
    """The constants of the covariance, in units of the labels' robust deviation."""

    relevance: tuple[float, ...]
    """Of each group of features: an inverse length, where a group's mean squared norm is 1."""
    smooth: float = 0.7
    """Deviation of the Matern part."""
    linear: float = 0.3
    """Deviation of the linear part."""
    level: float = 0.3
    """Deviation of a constant common to all."""
    noise: float = 0.5
    """Scale of the Student-t noise that reweighting starts from."""


def covariance_matrix(first: Array, second: Array, groups: Sequence[int], at: Covariance) -> Array:
    """The covariance of points (n, c) and (m, c), as `Coordinates.apply` gives them: (n, m)."""
    relevance = np.repeat(at.relevance, groups)
    smooth = matern32(first * relevance, second * relevance)
    summed: Array = at.smooth**2 * smooth + at.linear**2 * (first @ second.T) + at.level**2
    return summed


def variances(points: Array, at: Covariance) -> Array:
    """The covariance of each point (n, c) with itself (n)."""
    summed: Array = at.smooth**2 + at.linear**2 * (points**2).sum(axis=1) + at.level**2
    return summed


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A fitted process, as what its predictions need of the covariances of x and the landmarks."""

    coordinates: Coordinates
    covariance: Covariance
    unit: float
    """What the labels were divided by."""
    landmarks: Array
    """(m, c), as coordinates."""
    weights: Array
    """The mean is `covariance(x, landmarks) @ weights` (m)."""
    explained: Array
    """The variance that labels take away is `k @ explained @ k` of these covariances k (m, m)."""
    noise: float
    """Scale of the Student-t noise, in units of `unit`."""

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Mean for n rows of features (n), and its deviation without the noise (n)."""
        points = self.coordinates.apply(features)
        groups = self.coordinates.groups
        inner = covariance_matrix(points, self.landmarks, groups, self.covariance)
        explained = ((inner @ self.explained) * inner).sum(axis=1)
        variance = np.maximum(variances(points, self.covariance) - explained, 0.0)
        return self.unit * (inner @ self.weights), self.unit * np.sqrt(variance)

    def tensors(self) -> dict[str, Tensor]:
        c = self.covariance
        arrays = {
            "middle": self.coordinates.middle,
            "scale": self.coordinates.scale,
            "groups": np.array(self.coordinates.groups, dtype=np.int64),
            "relevance": np.array(c.relevance),
            "constants": np.array([c.smooth, c.linear, c.level, c.noise, self.unit, self.noise]),
            "landmarks": self.landmarks.astype(np.float32),
            "word": self.weights,
            "explained": self.explained[np.triu_indices(len(self.explained))],
        }
        return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of a process."""
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        groups = tuple(int(g) for g in arrays["groups"])
        smooth, linear, level, noise, unit, fitted_noise = (float(v) for v in arrays["constants"])
        count, columns = arrays["landmarks"].shape
        fits = (
            sum(groups) == columns == len(arrays["middle"]) == len(arrays["scale"])
            and len(arrays["relevance"]) == len(groups)
            and arrays["word"].shape == (count,)
            and arrays["explained"].shape == (count * (count + 1) // 2,)
        )
        if not fits:
            raise ValueError("the tensors of a Gaussian process do not fit together")
        explained = np.zeros((count, count))
        explained[np.triu_indices(count)] = arrays["explained"]
        return cls(
            Coordinates(arrays["middle"], arrays["scale"], groups),
            Covariance(tuple(arrays["relevance"].tolist()), smooth, linear, level, noise),
            unit,
            arrays["landmarks"].astype(np.float64),
            arrays["word"],
            explained + np.triu(explained, 1).T,
            fitted_noise,
        )


@dataclass(frozen=True, eq=False)
class FoldPredictions:
    """Predictions of each label by a model that has not seen the label's fold (n) each."""

    mean: Array
    deviation: Array


def fit_process(
    features: Array,
    values: Array,
    groups: Sequence[int],
    folds: IntArray,
    generator: np.random.Generator,
    bounds: Array | None = None,
) -> tuple[GaussianProcess, FoldPredictions]:
    """Fits a process to n labels; beside it, its predictions of each fold without that fold.

    Args:
        features: (n, f), finite.
        values: what to explain (n); NaN where only a bound is known.
        groups: number of columns of each group of features.
        folds: the fold of each label (n); the covariance is chosen by predictions across them.
        generator: draws landmarks, and the labels to choose the covariance on.
        bounds: lower bounds of the values that are not known (n), NaN elsewhere.
    """
    known = np.flatnonzero(~np.isnan(values))
    unit = max(robust_deviation(values[known]), LEAST_NOISE)
    coordinates = Coordinates.fit(features, groups)
    points = coordinates.apply(features)
    rows = np.sort(generator.permutation(known)[:TUNING_ROWS])
    covariance = _choose(points[rows], values[rows] / unit, folds[rows], coordinates.groups, unit)
    chosen = np.sort(generator.permutation(len(values))[:LANDMARKS])
    landmarks = points[chosen].astype(np.float32).astype(np.float64)  # half to keep
    root = nystroem_root(covariance_matrix(landmarks, landmarks, coordinates.groups, covariance))
    labels = _Labels(
        inner=covariance_matrix(points, landmarks, coordinates.groups, covariance) @ root,
        values=values / unit,
        bounds=np.full(len(values), np.nan) if bounds is None else bounds / unit,
        first_noise=covariance.noise,
        least_noise=LEAST_NOISE / unit,
    )
    missed = np.maximum(variances(points, covariance) - (labels.inner**2).sum(axis=1), 0.0)
    unseen = _across_folds(labels, folds, missed)
    posterior = _posterior(labels)
    # In terms of the landmarks instead of their features, since one root less is kept.
    spread = posterior.spread
    explained = root @ (np.eye(len(spread)) - spread @ spread.T) @ root.T
    process = GaussianProcess(
        coordinates=coordinates,
        covariance=covariance,
        unit=unit,
        landmarks=landmarks,
        weights=root @ posterior.mean,
        explained=(explained + explained.T) / 2,  # to the last bit, since one half is kept
        noise=posterior.noise,
    )
    return process, FoldPredictions(unit * unseen.mean, unit * unseen.deviation)


@dataclass(frozen=True, eq=False)
class _Labels:
    """What a posterior is made from, in units of the labels' robust deviation."""

    inner: Array
    """Features whose inner products are covariances (n, p)."""
    values: Array
    """(n); NaN where only a bound is known."""
    bounds: Array
    """(n); NaN where the value is known, or neither is."""
    first_noise: float
    least_noise: float

    def rows(self, chosen: npt.NDArray[np.bool_]) -> _Labels:
        return replace(
            self,
            inner=self.inner[chosen],
            values=self.values[chosen],
            bounds=self.bounds[chosen],
        )


@dataclass(frozen=True, eq=False)
class _Posterior:
    """Of the weights of p features."""

    mean: Array
    """(p)."""
    spread: Array
    """Root of their covariance (p, p)."""
    noise: float


def _across_folds(labels: _Labels, folds: IntArray, missed: Array) -> FoldPredictions:
    """Predictions of each fold by the other folds; `missed` is what features lack of variance."""
    mean, deviation = np.zeros(len(folds)), np.zeros(len(folds))
    for fold in np.unique(folds):
        out = folds == fold
        posterior = _posterior(labels.rows(~out))
        inner = labels.inner[out]
        mean[out] = inner @ posterior.mean
        deviation[out] = np.sqrt(((inner @ posterior.spread) ** 2).sum(axis=1) + missed[out])
    return FoldPredictions(mean, deviation)


def _posterior(labels: _Labels) -> _Posterior:
    inner, noise = labels.inner, labels.first_noise
    known = ~np.isnan(labels.values)
    targets, precision = _above(labels.bounds, np.zeros(len(inner)), noise)
    targets = np.where(known, labels.values, targets)
    precision = np.where(known, 1.0 / noise**2, precision)
    factor = identity = np.eye(inner.shape[1])
    mean: Array = np.zeros(inner.shape[1])
    chunks = [slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, len(inner), ROWS_AT_ONCE)]
    for _ in range(ITERATIONS):
        curvature, root = identity, np.sqrt(precision)
        for rows in chunks:
            weighted = inner[rows] * root[rows, None]
            curvature = curvature + weighted.T @ weighted  # half the work of any other product
        factor = cholesky(curvature)
        mean = backward_solved(factor, forward_solved(factor, inner.T @ (precision * targets)))
        fitted = inner @ mean
        unsure = [(forward_solved(factor, inner[rows].T) ** 2).sum(axis=0) for rows in chunks]
        # The expected square of an error knows that the mean itself is uncertain.
        squares = (targets - fitted) ** 2 + np.concatenate(unsure)
        noise = fitted_scale(squares[known], noise, guess=noise, lowest=labels.least_noise)
        pulled, pull = _above(labels.bounds, fitted, noise)
        targets = np.where(known, labels.values, pulled)
        precision = np.where(known, precisions(squares, noise), pull)
    return _Posterior(mean, backward_solved(factor, identity), noise)


def _above(bounds: Array, means: Array, noise: float) -> tuple[Array, Array]:
    """The label and its precision that pull as "the value lies above the bound" does (n) each.

    The second-order expansion of log P(value > bound) around the mean of n labels, the weight
    of labels far below their bound as of Student-t errors. Bounds that are NaN give NaN.
    """
    gap = (bounds - means) / noise
    tail = torch.special.log_ndtr(torch.from_numpy(-gap)).numpy()
    hazard = np.exp(-0.5 * gap**2 - 0.5 * np.log(2.0 * np.pi) - tail)
    bend = np.maximum(hazard * (hazard - gap), 1e-12)
    degrees = DEGREES_OF_FREEDOM
    trust = (degrees + 1.0) / (degrees + 1.0 + np.maximum(gap, 0.0) ** 2)
    return means + noise * hazard / bend, trust * bend / noise**2


# Steps of a factor of two or so about what fits an embedding with groups of mean norm 1; coordinate
# descent picks among them by likelihood, so they set how finely, not what.
SMOOTH_TRIED = (0.35, 0.7, 1.4)
LINEAR_TRIED = (0.0, 0.15, 0.3, 0.8)
RELEVANCES_TRIED = (0.1, 0.3, 1.0, 2.0)
FIRST_RELEVANCE = 0.5
"""Where the descent begins, between the second and the third of those tried."""
SWEEPS = 2
"""Of coordinate descent over all constants."""
CAUTION = 1.0
"""Nats that another covariance must gain over the one at hand."""


def _choose(
    points: Array, values: Array, folds: IntArray, groups: Sequence[int], unit: float
) -> Covariance:
    """The covariance with the most probable predictions across folds, by coordinate descent."""
    best = Covariance(relevance=(FIRST_RELEVANCE,) * len(groups))
    loss = _unseen_loss(points, values, folds, groups, best, unit)
    for _ in range(SWEEPS):
        before = best
        for constant in ("smooth", "linear", *range(len(groups))):
            for candidate in _with_another(best, constant):
                new_loss = _unseen_loss(points, values, folds, groups, candidate, unit)
                if new_loss < loss - CAUTION:
                    best, loss = candidate, new_loss
        if best == before:
            break
    return best


def _with_another(at: Covariance, constant: str | int) -> Iterator[Covariance]:
    """Covariances that differ in one constant: a part's deviation, or a group's relevance."""
    if constant == "smooth":
        yield from (replace(at, smooth=value) for value in SMOOTH_TRIED)
    elif constant == "linear":
        yield from (replace(at, linear=value) for value in LINEAR_TRIED)
    else:
        number = int(constant)
        for value in RELEVANCES_TRIED:
            relevance = (*at.relevance[:number], value, *at.relevance[number + 1 :])
            yield replace(at, relevance=relevance)


def _unseen_loss(
    points: Array,
    values: Array,
    folds: IntArray,
    groups: Sequence[int],
    at: Covariance,
    unit: float,
) -> float:
    """Negative log probability (Student-t) of each label under the process without its fold."""
    inner = covariance_matrix(points, points, groups, at)
    total = 0.0
    for fold in np.unique(folds):
        out = folds == fold
        cross = inner[np.ix_(out, ~out)]
        solved = solve(
            inner[np.ix_(~out, ~out)],
            values[~out],
            at.noise,
            steps=TUNING_ITERATIONS,
            least_noise=LEAST_NOISE / unit,
        )
        variance = np.maximum(variances(points[out], at) - solved.explained(cross), 0.0)
        scale = np.sqrt(variance + solved.noise**2)
        total += float(losses(values[out] - cross @ solved.weights, scale).sum())
    return total
