"""A Gaussian process that believes no single label too much: the residual at few labels.

The covariance is Matern 3/2 over groups of features, each group with a relevance of its own, and a
linear part. Noise is Student-t (4 degrees of freedom), by iteratively reweighted least squares
(Tipping and Lawrence 2005), since some runs surprise everybody. Above `LANDMARKS` labels the
covariance is that of Nystroem features (Williams and Seeger 2001), with the variance that they miss
added to each prediction, as in FITC (Snelson and Ghahramani 2006). Of some labels only a bound is
known (runs out of memory): they have the likelihood of lying above it (Tobin 1958), which
takes part in the same reweighting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LANDMARKS = 512
DEGREES_OF_FREEDOM = 4.0
CLIP = 5.0
"""Features stay within so many deviations of the training mean."""
ITERATIONS = 8
"""Of reweighting; each is one solve."""
TUNING_ROWS = 300
"""Labels that the covariance is chosen on; more of them cost time and change little."""
LEAST_NOISE = 0.003
"""Repeated runs differ by about this much in the logarithm."""


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


@dataclass(frozen=True, eq=False)
class Coordinates:
    """From features to where they stand: scaled columns, grouped, each group of mean norm 1."""

    middle: Array
    scale: Array
    groups: tuple[int, ...]
    """Number of columns of each group, in order."""

    @classmethod
    def fit(cls, features: Array, groups: Sequence[int]) -> Self:
        middle = features.mean(axis=0) if len(features) else np.zeros(features.shape[1])
        deviation = features.std(axis=0) if len(features) else np.zeros(features.shape[1])
        # A column that never varied says nothing yet: what differs there later must not run away.
        scale = np.where(deviation < 1e-9, np.inf, deviation * _norms(groups))
        return cls(middle, scale, tuple(groups))

    def apply(self, features: Array) -> Array:
        bound = CLIP / _norms(self.groups)
        scaled: Array = np.clip((features - self.middle) / self.scale, -bound, bound)
        return scaled


def _norms(groups: Sequence[int]) -> Array:
    """For each column, the norm of its group's columns when each of them has deviation 1."""
    return np.repeat(np.sqrt(np.maximum(groups, 1)), groups)


def covariance_matrix(first: Array, second: Array, groups: Sequence[int], at: Covariance) -> Array:
    """The covariance of points (n, c) and (m, c), as `Coordinates.apply` gives them: (n, m)."""
    relevance = np.repeat(at.relevance, groups)
    a, b = first * relevance, second * relevance
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * a @ b.T
    distance = np.sqrt(3.0 * np.maximum(squares, 0.0))
    smooth = (1.0 + distance) * np.exp(-distance)
    found: Array = at.smooth**2 * smooth + at.linear**2 * (first @ second.T) + at.level**2
    return found


def variances(points: Array, at: Covariance) -> Array:
    """The covariance of each point (n, c) with itself (n)."""
    found: Array = at.smooth**2 + at.linear**2 * (points**2).sum(axis=1) + at.level**2
    return found


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A fitted process, as what its predictions need of the covariances of x and the landmarks."""

    coordinates: Coordinates
    covariance: Covariance
    unit: float
    """What the labels were divided by."""
    landmarks: Array
    """(m, c), as coordinates."""
    word: Array
    """The mean is `covariance(x, landmarks) @ word` (m)."""
    explained: Array
    """The variance that labels take away is `k @ explained @ k` of these covariances k (m, m)."""
    noise: float
    """Scale of the Student-t noise, in units of `unit`."""

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Mean of what n rows of features say, and its deviation without the noise (n) each."""
        points = self.coordinates.apply(features)
        groups = self.coordinates.groups
        inner = covariance_matrix(points, self.landmarks, groups, self.covariance)
        explained = ((inner @ self.explained) * inner).sum(axis=1)
        variance = np.maximum(variances(points, self.covariance) - explained, 0.0)
        return self.unit * (inner @ self.word), self.unit * np.sqrt(variance)

    def tensors(self) -> dict[str, Tensor]:
        c = self.covariance
        arrays = {
            "middle": self.coordinates.middle,
            "scale": self.coordinates.scale,
            "groups": np.array(self.coordinates.groups, dtype=np.int64),
            "relevance": np.array(c.relevance),
            "constants": np.array([c.smooth, c.linear, c.level, c.noise, self.unit, self.noise]),
            "landmarks": self.landmarks.astype(np.float32),
            "word": self.word,
            "explained": self.explained[np.triu_indices(len(self.explained))],
        }
        return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of a process."""
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        groups = tuple(int(g) for g in arrays["groups"])
        smooth, linear, level, noise, unit, found_noise = (float(v) for v in arrays["constants"])
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
            found_noise,
        )


@dataclass(frozen=True, eq=False)
class FoldPredictions:
    """What a process says of each label when it has not seen the label's fold (n) each."""

    mean: Array
    deviation: Array


def fit_process(
    features: Array,
    values: Array,
    groups: Sequence[int],
    folds: IntArray,
    generator: np.random.Generator,
    least: Array | None = None,
) -> tuple[GaussianProcess, FoldPredictions]:
    """A process of n labels, and what it says of each fold without it.

    Args:
        features: (n, f), finite.
        values: what to explain (n); NaN where only a bound is known.
        groups: number of columns of each group of features.
        folds: the fold of each label (n); the covariance is chosen by predictions across them.
        generator: draws landmarks, and the labels to choose the covariance on.
        least: lower bounds of the values that are not known (n), NaN elsewhere.
    """
    known = np.flatnonzero(~np.isnan(values))
    unit = max(1.4826 * float(np.median(np.abs(values[known]))), LEAST_NOISE)
    scaled = values / unit
    bounds = np.full(len(values), np.nan) if least is None else least / unit
    coordinates = Coordinates.fit(features, groups)
    points = coordinates.apply(features)
    some = np.sort(generator.permutation(known)[:TUNING_ROWS])
    covariance = _choose(points[some], scaled[some], folds[some], coordinates.groups, unit)
    chosen = np.sort(generator.permutation(len(values))[:LANDMARKS])
    landmarks = points[chosen].astype(np.float32).astype(np.float64)  # half to keep
    root = _root(landmarks, coordinates.groups, covariance)
    inner = covariance_matrix(points, landmarks, coordinates.groups, covariance) @ root
    missed = np.maximum(variances(points, covariance) - (inner**2).sum(axis=1), 0.0)
    quietest = LEAST_NOISE / unit
    mean, deviation = np.zeros(len(values)), np.zeros(len(values))
    for fold in np.unique(folds):
        out = folds == fold
        weights, spread, _ = _posterior(
            inner[~out], scaled[~out], bounds[~out], covariance.noise, quietest
        )
        mean[out] = inner[out] @ weights
        deviation[out] = np.sqrt(((inner[out] @ spread) ** 2).sum(axis=1) + missed[out])
    weights, spread, noise = _posterior(inner, scaled, bounds, covariance.noise, quietest)
    # What weights of the features say, said by the landmarks themselves: half of the numbers.
    explained = root @ (np.eye(len(spread)) - spread @ spread.T) @ root.T
    explained = (explained + explained.T) / 2  # to the last bit, since one half is kept
    process = GaussianProcess(
        coordinates, covariance, unit, landmarks, root @ weights, explained, noise
    )
    return process, FoldPredictions(unit * mean, unit * deviation)


def _root(landmarks: Array, groups: Sequence[int], at: Covariance) -> Array:
    """What makes covariances with the landmarks features whose products are covariances (m, p)."""
    inner = covariance_matrix(landmarks, landmarks, groups, at)
    values, vectors = np.linalg.eigh(inner)
    keep = values > 1e-9 * max(float(values[-1]), 1e-12)
    root: Array = vectors[:, keep] / np.sqrt(values[keep])
    return root


def _posterior(
    inner: Array, values: Array, bounds: Array, noise: float, quietest: float
) -> tuple[Array, Array, float]:
    """Mean and root of the covariance of the features' weights, and the scale of the noise."""
    dof = DEGREES_OF_FREEDOM
    known = ~np.isnan(values)
    targets, precision = _above(bounds, np.zeros(len(values)), noise)
    targets = np.where(known, values, targets)
    precision = np.where(known, 1.0 / noise**2, precision)
    identity = np.eye(inner.shape[1])
    mean: npt.NDArray[Any] = np.zeros(inner.shape[1])
    spread = identity
    for _ in range(ITERATIONS):
        weighted = inner * precision[:, None]
        spread = _inverse_root(weighted.T @ inner + identity)
        mean = spread @ (spread.T @ (weighted.T @ targets))
        said = inner @ mean
        # The expected square of an error knows that the mean itself is uncertain.
        squares = (targets - said) ** 2 + ((inner @ spread) ** 2).sum(axis=1)
        weight = (dof + 1.0) / (dof + squares / noise**2)
        # Two labels' worth of belief in the first guess.
        total = float((weight * squares)[known].sum()) + 2.0 * noise**2
        noise = max(float(np.sqrt(total / (np.count_nonzero(known) + 2.0))), quietest)
        pulled, pull = _above(bounds, said, noise)
        targets = np.where(known, values, pulled)
        precision = np.where(known, (dof + 1.0) / (dof * noise**2 + squares), pull)
    return mean, spread, noise


def _inverse_root(matrix: Array) -> Array:
    """Of a positive definite matrix, r with `r @ r.T` its inverse."""
    factor = torch.linalg.cholesky(torch.from_numpy(matrix))
    identity = torch.eye(len(matrix), dtype=torch.float64)
    found: Array = torch.linalg.solve_triangular(factor, identity, upper=False).T.numpy()
    return found


def _above(bounds: Array, said: Array, noise: float) -> tuple[Array, Array]:
    """The label and its precision that pull as "the value lies above the bound" does (n) each.

    The second-order expansion of log P(value > bound) around the mean of n labels, the weight
    of labels far below their bound as of Student-t errors. Bounds that are NaN give NaN.
    """
    gap = (bounds - said) / noise
    tail = torch.special.log_ndtr(torch.from_numpy(-gap)).numpy()
    hazard = np.exp(-0.5 * gap**2 - 0.5 * np.log(2.0 * np.pi) - tail)
    bend = np.maximum(hazard * (hazard - gap), 1e-12)
    dof = DEGREES_OF_FREEDOM
    trust = (dof + 1.0) / (dof + 1.0 + np.maximum(gap, 0.0) ** 2)
    return said + noise * hazard / bend, trust * bend / noise**2


_STEPS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("smooth", (0.35, 0.7, 1.4)),
    ("linear", (0.0, 0.15, 0.3, 0.8)),
    ("relevance", (0.1, 0.3, 1.0, 2.0)),
)
_CAUTION = 1.0
"""Nats that another covariance must gain over the one at hand."""


def _choose(
    points: Array, values: Array, folds: IntArray, groups: Sequence[int], unit: float
) -> Covariance:
    """The covariance with the most probable predictions across folds, by coordinate descent."""
    best = Covariance(relevance=(0.5,) * len(groups))
    loss = _unseen_loss(points, values, folds, groups, best, unit)
    for _ in range(2):
        before = best
        for name, tried in _STEPS:
            for number in range(len(groups) if name == "relevance" else 1):
                for value in tried:
                    if name == "relevance":
                        relevance = list(best.relevance)
                        relevance[number] = value
                        candidate = replace(best, relevance=tuple(relevance))
                    else:
                        candidate = replace(best, **{name: value})  # type: ignore[arg-type]
                    found = _unseen_loss(points, values, folds, groups, candidate, unit)
                    if found < loss - _CAUTION:
                        best, loss = candidate, found
        if best == before:
            break
    return best


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
    dof, total = DEGREES_OF_FREEDOM, 0.0
    for fold in np.unique(folds):
        out = folds == fold
        known, cross = inner[np.ix_(~out, ~out)], inner[np.ix_(out, ~out)]
        precision = np.full(len(known), 1.0 / at.noise**2)
        noise = at.noise
        for _ in range(3):
            factor = np.linalg.cholesky(known + np.diag(1.0 / precision))
            solved = torch.cholesky_inverse(torch.from_numpy(factor)).numpy()
            alpha = solved @ values[~out]
            # Errors of the fit and their variance, both from the inverse (Rasmussen and Williams
            # 2006, section 5.4.2): y - f = alpha / precision.
            squares = (alpha / precision) ** 2 + (1.0 - np.diag(solved) / precision) / precision
            weight = (dof + 1.0) / (dof + squares / noise**2)
            summed = float((weight * squares).sum()) + 2.0 * noise**2
            noise = max(float(np.sqrt(summed / (len(known) + 2.0))), LEAST_NOISE / unit)
            precision = (dof + 1.0) / (dof * noise**2 + squares)
        mean = cross @ alpha
        variance = variances(points[out], at) - np.einsum("ij,jk,ik->i", cross, solved, cross)
        scale = np.sqrt(np.maximum(variance, 0.0) + noise**2)
        errors = (values[out] - mean) / scale
        total += float((np.log(scale) + 0.5 * (dof + 1.0) * np.log1p(errors**2 / dof)).sum())
    return total
