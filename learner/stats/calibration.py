"""Conformal intervals from out-of-fold errors, and distances from the labels.

Errors on architectures that a model has not seen, each divided by the deviation that the model
stated, are kept as quantiles (split conformal prediction, Vovk et al. 2005; by folds, Vovk 2015;
normalized errors, Papadopoulos et al. 2008). Coverage holds empirically: labels that a strategy
chose are not exchangeable with the pool, and the folds also tuned the model. Both sides have their
own quantiles, since memory has outliers upwards only. A run out of memory is an error of at least
its bound in the product-limit estimate of the quantiles (Kaplan and Meier 1958).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.interface import Array, BoolArray, IntArray, Targets
from trappm.learner.stats.student_t import losses, robust_deviation
from trappm.profiler.errors import InputError

COVERAGE = 0.9
"""Share of new architectures whose value an interval should contain."""
LEVELS = np.concatenate([[0.002, 0.005], np.linspace(0.01, 0.99, 99), [0.995, 0.998]])
"""Probability levels of the stored quantiles."""
_ENDS = [
    int(np.argmin(np.abs(LEVELS - level))) for level in (0.5 - COVERAGE / 2, 0.5 + COVERAGE / 2)
]
"""Places of the interval's ends among the levels."""
TAIL = 2.0
"""Beyond the stored quantiles, the probability falls with this power of the distance (round
number): a few outliers in thousands of runs have no end that labels could show."""
PSEUDO_ERRORS = 10.0
"""Number of Student-t errors with 4 degrees of freedom that complete few errors. It is the least
round number for which intervals from 15 errors on have their coverage with normal, Laplace and
Student-t errors (tests/learner/stats/test_intervals.py)."""
_STUDENT = np.array(
    [-4.604, -2.776, -2.132, -1.533, -1.19, -0.941, -0.741, -0.569, -0.414, -0.271, -0.134,
     0.0, 0.134, 0.271, 0.414, 0.569, 0.741, 0.941, 1.19, 1.533, 2.132, 2.776, 4.604]
)  # fmt: skip
"""Quantiles of these errors at 0.005, 0.025, 0.05, 0.1, 0.15, ... 0.5 and mirrored."""
_STUDENT_MASS = np.array([0.015, 0.0225, 0.0375, *[0.05] * 17, 0.0375, 0.0225, 0.015])


@dataclass(frozen=True, eq=False)
class Calibration:
    """Quantiles of errors in units of the stated deviation, at `LEVELS`, rising.

    >>> errors = np.random.default_rng(0).normal(scale=0.1, size=200)
    >>> names = [f"network {i}" for i in range(200)]
    >>> low, high = Calibration.fit(errors, np.full(200, 0.1), names).interval()
    >>> low < -1.3 and 1.3 < high < 2.0
    True
    """

    quantiles: Array

    @classmethod
    def fit(
        cls,
        errors: Array,
        deviations: Array,
        groups: Sequence[str],
        known: BoolArray | None = None,
    ) -> Self:
        """Fit the quantiles to out-of-fold errors.

        Every architecture has one vote, since its batch sizes are near-copies.

        Args:
            errors: log(measured / predicted) of labels (n).
            deviations: Stated deviations (n).
            groups: Architecture of each label (n).
            known: Where an error is not just a lower bound (n; default: everywhere).

        Raises:
            InputError: The shapes differ, or a deviation is not positive.
        """
        if not len(errors) == len(deviations) == len(groups):
            raise InputError(
                f"{len(errors)} errors, {len(deviations)} deviations and {len(groups)} groups "
                "are not one of each for every label"
            )
        if np.any(deviations <= 0):
            raise InputError("a deviation is not positive")
        _, number, count = np.unique(np.array(groups), return_inverse=True, return_counts=True)
        pseudo = PSEUDO_ERRORS / (1.0 + (len(count) / PSEUDO_ERRORS) ** 2)  # fades with own errors
        ratios = np.concatenate([errors / deviations, _STUDENT])
        votes = np.concatenate([1.0 / count[number], pseudo * _STUDENT_MASS / _STUDENT_MASS.sum()])
        sure = np.ones(len(ratios), dtype=bool)
        if known is not None:
            sure[: len(known)] = known
        order = np.lexsort((~sure, ratios))
        # At risk at each error: its vote and all above. A bound passes its vote on to those.
        at_risk = np.cumsum(votes[order][::-1])[::-1]
        hazard = np.where(sure[order], votes[order] / at_risk, 0.0)
        hazard[-1] = 1.0
        surviving = np.cumprod(1.0 - hazard)
        mass = hazard * np.append(1.0, surviving[:-1])
        # The k-th of n errors is the quantile k / (n + 1): the next architecture has a vote, too.
        total = at_risk[0]
        level = ((1.0 - surviving - 0.5 * mass) * total + 0.5) / (total + 1.0)
        return cls(np.interp(LEVELS, level[mass > 0], ratios[order][mass > 0]))

    def interval(self) -> tuple[float, float]:
        """Return the ends of the interval in deviations; the prediction is between them."""
        low, high = self.quantiles[_ENDS]
        return min(float(low), 0.0), max(float(high), 0.0)

    def log_quantiles(self, middle: Array, deviations: Array) -> Array:
        """Return quantiles (n, levels) of values with these logarithms and deviations (n)."""
        quantiles: Array = middle[:, None] + deviations[:, None] * self.quantiles
        return quantiles

    def exceeding(self, ratios: Array) -> Array:
        """Return the probability of an error above this many stated deviations (n)."""
        first, last = min(float(self.quantiles[0]), -1e-6), max(float(self.quantiles[-1]), 1e-6)
        within = 1.0 - np.interp(ratios, self.quantiles, LEVELS)
        above = LEVELS[0] * (last / np.maximum(ratios, last)) ** TAIL
        below = LEVELS[0] * (first / np.minimum(ratios, first)) ** TAIL
        beyond = [ratios > self.quantiles[-1], ratios < self.quantiles[0]]
        probabilities: Array = np.select(beyond, [above, 1.0 - below], within)
        return probabilities

    def tensors(self) -> dict[str, Tensor]:
        return {"quantiles": torch.from_numpy(self.quantiles.copy())}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read a calibration; raise KeyError or ValueError for other tensors."""
        quantiles = tensors["quantiles"].numpy()
        if quantiles.shape != LEVELS.shape or not np.all(np.diff(quantiles) >= 0):
            raise ValueError("the quantiles of a calibration must rise, one for each level")
        return cls(quantiles)


def central_interval(log_quantiles: Array) -> tuple[Array, Array]:
    """Return the ends of the intervals (n) of distributions (n, levels)."""
    low, high = log_quantiles[:, _ENDS].T
    return low, high


FAR = 3.0
"""Factor beyond the largest or least label beyond which a value is extrapolated (round number)."""


@dataclass(frozen=True)
class LabelledRange:
    """Least and largest label, in the metric's unit; intervals widen far beyond them.

    On CPU cores, intervals of step times had 80 % coverage up to three times the largest label and
    31 % from ten to fifteen times; widened as here, 70 % (docs/research/intervals.md).
    """

    low: float
    high: float

    @classmethod
    def of(cls, targets: Targets) -> Self | None:
        """Return the range of values and lower bounds; None without labels."""
        known = np.fmax(targets.values, targets.above)
        return cls(float(known.min()), float(known.max())) if len(known) else None

    def widened(self, deviations: Array, log_values: Array) -> Array:
        """Return deviations (n), twice as large for each factor of `FAR` beyond the first."""
        below, above = np.log(self.low) - log_values, log_values - np.log(self.high)
        widened: Array = deviations * np.maximum(np.maximum(below, above) / np.log(FAR), 1.0)
        return widened

    def end_before(self, values: Array) -> Array:
        """Return the label that predicted values (n) extrapolate from; NaN where none."""
        extrapolated = [values > FAR * self.high, values < self.low / FAR]
        ends: Array = np.select(extrapolated, [self.high, self.low], np.nan)
        return ends

    def tensors(self) -> dict[str, Tensor]:
        return {"ends": torch.tensor([self.low, self.high], dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read a range; raise KeyError or ValueError for other tensors."""
        low, high = tensors["ends"].tolist()
        if not 0.0 < low <= high < np.inf:
            raise ValueError(f"labels between {low} and {high}")
        return cls(low, high)


REACH = 1.5
"""Factor on the usual distance (99th percentile) within which a workload is familiar."""
FARTHEST, CLIP = 25.0, 1e4
"""Largest distance from the labels that widens an interval, and largest scaled feature."""
MIN_DISTANCE = 0.1
"""Least usual distance: nearer labels do not show how errors grow with distance."""
WIDENINGS = (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)
"""Candidates for the widening, in units of the noise at the usual distance."""
USUAL_WIDENING, WIDENING_SPREAD = 0.35, 0.5
"""Center of the prior of the widening, and deviation of its logarithm: between the folds of 400 RTX
3090 steps and of 630 architectures' memory. Round numbers, as all in this group."""
MAX_POINTS = 8192
"""Number of evenly spaced labels that are stored: several per architecture of timm."""
_ROWS = 128
"""Rows per block, which bounds the memory."""


@dataclass(frozen=True, eq=False)
class UnseenErrors:
    """Out-of-fold errors of n labels."""

    errors: Array
    """Errors of the logarithm (n)."""
    deviations: Array
    """Deviations that the models stated (n)."""
    folds: IntArray
    """Fold of each label (n)."""


@dataclass(frozen=True, eq=False)
class Familiarity:
    """Positions of the labelled architectures, to recognize workloads unlike all of them."""

    points: Array
    """Scaled features of labelled workloads (m, f), in half precision's values."""
    middle: Array
    scale: Array
    reach: float
    """Distance beyond which a workload is unlike all labels."""
    widening: float = 0.0
    """Deviation that a unit of distance to the nearest label adds, as an independent error."""

    @classmethod
    def fit(cls, features: Array, groups: Sequence[str]) -> Self:
        """Fit to the features (n, f) and the architecture of each label (n)."""
        deviation = features.std(axis=0)
        scale = np.where(deviation < 1e-9, 1.0, deviation)
        fitted = cls(np.zeros((0, features.shape[1])), features.mean(axis=0), scale, 0.0)
        points = fitted._scaled(features)
        distances = _nearest(points, points, _numbers(groups))
        known = distances[np.isfinite(distances)]
        reach = REACH * float(np.quantile(known, 0.99)) if len(known) else 0.0
        return replace(fitted, points=points, reach=reach)

    def fit_widening(
        self, unseen: Sequence[UnseenErrors], noise: float, groups: Sequence[str], known: BoolArray
    ) -> tuple[Self, Array]:
        """Fit the widening by the Student-t likelihood of out-of-fold errors.

        Folds of architectures hold out labels near the others, folds of clusters distant ones, so
        both together show how errors grow with distance.

        Args:
            unseen: Errors of the labels that this was fitted to, on folds of architectures first.
            noise: Deviation of the errors at the usual distance.
            groups: Architecture of each label (n); each has one vote.
            known: Where an error is not just a lower bound (n).

        Returns:
            The fitted record, and the widened deviations on the first folds (n).
        """
        distances = [
            np.minimum(_nearest(self.points, self.points, part.folds), FARTHEST) for part in unseen
        ]
        unit = noise / _usual(distances[0])
        number = _numbers(groups)
        votes = np.tile((1.0 / np.bincount(number)[number])[known], len(unseen))
        errors = np.concatenate([part.errors[known] for part in unseen])

        def widened(widening: float) -> list[Array]:
            return [
                np.hypot(part.deviations, widening * unit * distance)
                for part, distance in zip(unseen, distances, strict=True)
            ]

        def loss(widening: float) -> float:
            stated = np.concatenate([deviations[known] for deviations in widened(widening)])
            scale = max(robust_deviation(errors / stated), 1e-3)
            unusual = np.log(widening / USUAL_WIDENING) / WIDENING_SPREAD
            return float(votes @ losses(errors, stated * scale) + 0.5 * unusual**2)

        best = min(WIDENINGS, key=loss) if known.any() else USUAL_WIDENING
        stored = self.points[_evenly_spaced(len(self.points))]
        return replace(self, points=stored, widening=best * unit), widened(best)[0]

    def distance(self, features: Array) -> Array:
        """Return the distance to the nearest label of workloads (n) in standard deviations."""
        return _nearest(self._scaled(features), self.points)

    def outside(self, distance: Array) -> BoolArray:
        """Return which workloads (n) are farther from all labels than labels from each other."""
        unlike: BoolArray = distance > self.reach
        return unlike

    def widened(self, deviations: Array, distance: Array) -> Array:
        """Return deviations (n) with the part that the distance from the labels adds."""
        widened: Array = np.hypot(deviations, self.widening * np.minimum(distance, FARTHEST))
        return widened

    def _scaled(self, features: Array) -> Array:
        scaled = np.clip((features - self.middle) / self.scale, -CLIP, CLIP)
        return scaled.astype(np.float16).astype(np.float64)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "points": torch.from_numpy(self.points.astype(np.float16)),
            "middle": torch.from_numpy(self.middle.copy()),
            "scale": torch.from_numpy(self.scale.copy()),
            "reach": torch.tensor(self.reach, dtype=torch.float64),
            "widening": torch.tensor(self.widening, dtype=torch.float64),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read a familiarity; raise KeyError or ValueError for other tensors."""
        points, middle, scale = (tensors[n].numpy() for n in ("points", "middle", "scale"))
        if points.ndim != 2 or not points.shape[1:] == middle.shape == scale.shape:
            raise ValueError("the points of a familiarity do not have one scale for each column")
        widening = float(tensors["widening"])
        if not 0.0 <= widening < np.inf:
            raise ValueError(f"a familiarity that widens deviations by {widening}")
        return cls(points.astype(np.float64), middle, scale, float(tensors["reach"]), widening)


def _numbers(groups: Sequence[str]) -> IntArray:
    """Return a number for each label (n) that its architecture shares."""
    numbers: IntArray = np.unique(np.array(groups), return_inverse=True)[1]
    return numbers


def _evenly_spaced(count: int) -> IntArray:
    return np.linspace(0, count - 1, min(count, MAX_POINTS)).round().astype(np.int64)


def _usual(distances: Array) -> float:
    """Return the median of positive distances."""
    apart = distances[(distances > 0) & np.isfinite(distances)]
    return max(float(np.median(apart)) if len(apart) else 1.0, MIN_DISTANCE)


def _nearest(points: Array, others: Array, groups: IntArray | None = None) -> Array:
    """Return the distance of points (n, f) to the nearest of others (m, f), of another group."""
    distances = np.full(len(points), np.inf)
    squares = (others**2).sum(axis=1)
    for start in range(0, len(points) if len(others) else 0, _ROWS):
        rows = slice(start, start + _ROWS)
        own = points[rows]
        apart = (own**2).sum(axis=1)[:, None] + squares - 2.0 * own @ others.T
        if groups is not None:
            apart[groups[rows][:, None] == groups[None, :]] = np.inf
        distances[rows] = np.sqrt(np.maximum(apart.min(axis=1), 0.0))
    return distances
