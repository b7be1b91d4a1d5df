"""Calibration of predictions by errors on held-out architectures, and how far from labels they are.

A model's errors on architectures that it has not seen (its out-of-fold errors), each divided by the
deviation that the model stated, are kept as quantiles. A new error is one more of them (split
conformal prediction, Vovk et al. 2005; by folds, Vovk 2015; with normalised errors, Papadopoulos et
al. 2008), so an interval between two of the quantiles holds as often as it promises, and it is wide
where the model's deviation is: far from labels. Few errors are completed by those of a Student-t
distribution. The same quantiles give the probability that a value exceeds a limit, such as a
device's memory. Both sides have quantiles of their own: memory surprises upwards only. A run out of
memory is an error of at least so much, and counts as such in the product-limit estimate of the
quantiles (Kaplan and Meier 1958): without it, the larger a surprise, the rarer it would be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.stats.student_t import losses, robust_deviation
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]

COVERAGE = 0.9
"""Share of new architectures whose value an interval should contain."""
LEVELS = np.concatenate([[0.002, 0.005], np.linspace(0.01, 0.99, 99), [0.995, 0.998]])
"""Of the quantiles that are kept."""
TAIL = 2.0
"""Beyond them the probability falls with this power of the distance, as for Student-t errors: a
few surprises in thousands of runs have no end that labels could show."""
PSEUDO_ERRORS = 10.0
"""Few errors are completed by so many of a Student-t distribution with 4 degrees of freedom. The
least round number with which intervals from 15 errors on hold what they promise, of normal, Laplace
and Student-t errors (tests/learner/residual/test_conformal.py); fewer errors give wider ones."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Quantiles of errors in units of the stated deviation, at `LEVELS`, rising."""

    quantiles: Array

    @classmethod
    def fit(
        cls,
        errors: Array,
        deviations: Array,
        groups: Sequence[str],
        known: npt.NDArray[np.bool_] | None = None,
    ) -> Self:
        """From log(measured / predicted) on labels not seen (n), and the deviation stated (n).

        Where an error is not `known` (n; by default all are), it is a lower bound. Every
        architecture has one vote, whatever the number of its labels: batch sizes of one
        architecture are near-copies.

        Raises:
            InputError: shapes that differ, or a deviation that is not positive.
        """
        if not len(errors) == len(deviations) == len(groups):
            raise InputError(
                f"{len(errors)} errors, {len(deviations)} deviations and {len(groups)} groups "
                "are not one of each for every label"
            )
        if np.any(deviations <= 0):
            raise InputError("a deviation is not positive")
        _, number, count = np.unique(np.array(groups), return_inverse=True, return_counts=True)
        ratios = np.concatenate([errors / deviations, _STUDENT])
        votes = np.concatenate([1.0 / count[number], _student_votes(len(count))])
        sure = np.ones(len(ratios), dtype=bool)
        if known is not None:
            sure[: len(known)] = known
        order = np.lexsort((~sure, ratios))
        # What is at stake at each error: it and all above. A bound passes its vote on to those.
        at_stake = np.cumsum(votes[order][::-1])[::-1]
        hazard = np.where(sure[order], votes[order] / at_stake, 0.0)
        hazard[-1] = 1.0
        surviving = np.cumprod(1.0 - hazard)
        mass = hazard * np.append(1.0, surviving[:-1])
        # The next architecture has a vote, too, and may lie anywhere between the others: the k-th
        # of n errors is the quantile k / (n + 1), else few errors make intervals too narrow.
        total = at_stake[0]
        level = ((1.0 - surviving - 0.5 * mass) * total + 0.5) / (total + 1.0)
        return cls(np.interp(LEVELS, level[mass > 0], ratios[order][mass > 0]))

    def interval(self) -> tuple[float, float]:
        """How many deviations below and above the prediction a share `COVERAGE` of values lies.

        The prediction itself is always between them.
        """
        rest = (1.0 - COVERAGE) / 2
        low, high = np.interp([rest, 1.0 - rest], LEVELS, self.quantiles)
        return min(float(low), 0.0), max(float(high), 0.0)

    def log_quantiles(self, middle: Array, deviations: Array) -> Array:
        """Of n values with these predicted logarithms and deviations, at `LEVELS` (n, levels)."""
        quantiles: Array = middle[:, None] + deviations[:, None] * self.quantiles
        return quantiles

    def exceeding(self, ratios: Array) -> Array:
        """The probability of an error above this many stated deviations (n)."""
        first, last = float(self.quantiles[0]), float(self.quantiles[-1])
        within = 1.0 - np.interp(ratios, self.quantiles, LEVELS)
        above = LEVELS[0] * (max(last, 1e-6) / np.maximum(ratios, max(last, 1e-6))) ** TAIL
        below = LEVELS[0] * (min(first, -1e-6) / np.minimum(ratios, min(first, -1e-6))) ** TAIL
        probabilities: Array = np.select(
            [ratios > last, ratios < first], [above, 1.0 - below], within
        )
        return probabilities

    def tensors(self) -> dict[str, Tensor]:
        return {"quantiles": torch.from_numpy(self.quantiles.copy())}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of a calibration."""
        quantiles = tensors["quantiles"].numpy()
        if quantiles.shape != LEVELS.shape or not np.all(np.diff(quantiles) >= 0):
            raise ValueError("the quantiles of a calibration must rise, one for each level")
        return cls(quantiles)


def central_interval(log_quantiles: Array) -> tuple[Array, Array]:
    """Where a share `COVERAGE` of each of n distributions lies: low and high logarithms (n)."""
    rest = (1.0 - COVERAGE) / 2
    rows = [np.interp([rest, 1.0 - rest], LEVELS, row) for row in log_quantiles]
    low, high = np.array(rows).reshape(len(rows), 2).T
    return low, high


_STUDENT = np.array(
    [-4.604, -2.776, -2.132, -1.533, -1.19, -0.941, -0.741, -0.569, -0.414, -0.271, -0.134,
     0.0, 0.134, 0.271, 0.414, 0.569, 0.741, 0.941, 1.19, 1.533, 2.132, 2.776, 4.604]
)  # fmt: skip
"""Quantiles of Student's t with 4 degrees of freedom at 0.005, 0.025, 0.05, 0.1, 0.15, ... 0.5 and
mirrored."""
_STUDENT_MASS = np.array([0.015, 0.0225, 0.0375, *[0.05] * 17, 0.0375, 0.0225, 0.015])


def _student_votes(architectures: int) -> Array:
    """The votes of `_STUDENT`: they fade as soon as there are errors enough of our own."""
    weight = PSEUDO_ERRORS / (1.0 + (architectures / PSEUDO_ERRORS) ** 2)
    votes: Array = weight * _STUDENT_MASS / _STUDENT_MASS.sum()
    return votes


@dataclass(frozen=True, eq=False)
class UnseenErrors:
    """Of n labels by models that have not seen their fold."""

    errors: Array
    """Of the logarithm (n)."""
    deviations: Array
    """As the models stated them (n)."""
    folds: npt.NDArray[np.int64]
    """Of each label (n)."""


@dataclass(frozen=True, eq=False)
class Familiarity:
    """Where the labelled architectures lie, to recognise a workload that is like none of them."""

    points: npt.NDArray[np.float16]
    """Scaled features of labelled workloads (m, f)."""
    middle: Array
    scale: Array
    reach: float
    """The distance from one architecture to the nearest other that few (1 %) exceed."""
    widening: float = 0.0
    """What a unit of distance to the nearest label adds to a deviation, as independent errors do;
    0 for snapshots from before it was kept."""

    @classmethod
    def fit(cls, features: Array, groups: Sequence[str]) -> Self:
        """From the features of n labels and the architecture of each."""
        middle = features.mean(axis=0)
        deviation = features.std(axis=0)
        scale = np.where(deviation < 1e-9, 1.0, deviation)
        points = np.clip((features - middle) / scale, -FAR, FAR).astype(np.float16)
        _, number = np.unique(np.array(groups), return_inverse=True)
        distances = _nearest(points, points, number)
        known = distances[np.isfinite(distances)]
        reach = REACH * float(np.quantile(known, 0.99)) if len(known) else 0.0
        return cls(points, middle, scale, reach)

    def fit_widening(
        self,
        unseen: Sequence[UnseenErrors],
        noise: float,
        groups: Sequence[str],
        known: npt.NDArray[np.bool_],
    ) -> tuple[Self, Array]:
        """With the widening under which errors on folds not seen are most probable (Student-t).

        A residual that is unsure everywhere alike is too sure of architectures unlike all labels,
        as those of a new family are. Folds of architectures hold out what is near to labels, those
        of clusters what is far, so both together tell how errors grow between. Few of them tell
        little: it is drawn to `USUAL_WIDENING`, in units of the noise at the usual distance.

        Args:
            unseen: of the labels that this was fitted to, on folds of architectures first.
            noise: deviation of the errors at the usual distance.
            groups: of each label (n); every architecture has one vote, as in `Calibration`.
            known: where errors are no mere bounds (n).

        Returns:
            It, and the deviations on the first folds with what the distance to others adds (n).
        """
        distances = [
            np.minimum(_nearest(self.points, self.points, part.folds), FARTHEST) for part in unseen
        ]
        apart = distances[0][distances[0] > 0]
        unit = noise / max(float(np.median(apart)) if len(apart) else 1.0, LEAST_APART)
        _, number, count = np.unique(np.array(groups), return_inverse=True, return_counts=True)
        votes = np.tile((1.0 / count[number])[known], len(unseen))
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
        points = self.points[self._kept(len(self.points))]
        return replace(self, points=points, widening=best * unit), widened(best)[0]

    def usual_distance(self, groups: Sequence[str]) -> float:
        """From one of the architectures it was fitted to (n labels) to the nearest other."""
        _, number = np.unique(np.array(groups), return_inverse=True)
        distances = _nearest(self.points, self.points, number[self._kept(len(number))])
        apart = distances[(distances > 0) & np.isfinite(distances)]
        return max(float(np.median(apart)) if len(apart) else 1.0, LEAST_APART)

    def _kept(self, count: int) -> npt.NDArray[np.int64]:
        """Which of so many labels are kept to tell what is near."""
        kept = np.linspace(0, count - 1, min(count, MOST_POINTS))
        return kept.round().astype(np.int64)

    def distance(self, features: Array) -> Array:
        """Of n workloads to the nearest label, in deviations of the features (n)."""
        points = np.clip((features - self.middle) / self.scale, -FAR, FAR).astype(np.float16)
        return _nearest(points, self.points, wide=self._wide_points)

    @cached_property
    def _wide_points(self) -> tuple[Array, Array]:
        """See `_wide`: whoever asks one by one would have it made each time."""
        return _wide(self.points)

    def outside(self, distance: Array) -> npt.NDArray[np.bool_]:
        """Which of n workloads are farther from all labels than labels are from each other (n)."""
        unlike: npt.NDArray[np.bool_] = distance > self.reach
        return unlike

    def widened(self, deviations: Array, distance: Array) -> Array:
        """Deviations that know how far n workloads are from what is known (n)."""
        widened: Array = np.hypot(deviations, self.widening * np.minimum(distance, FARTHEST))
        return widened

    def tensors(self) -> dict[str, Tensor]:
        arrays: dict[str, npt.NDArray[Any]] = {
            "points": self.points,
            "middle": self.middle,
            "scale": self.scale,
        }
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        numbers = {"reach": self.reach, "widening": self.widening}
        return {**tensors, **{k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that do not fit together."""
        points, middle, scale = (tensors[n].numpy() for n in ("points", "middle", "scale"))
        if points.ndim != 2 or not points.shape[1:] == middle.shape == scale.shape:
            raise ValueError("the points of a familiarity do not have one scale for each column")
        widening = float(tensors.get("widening", 0.0))
        if not 0.0 <= widening < np.inf:
            raise ValueError(f"a familiarity that widens deviations by {widening}")
        return cls(points, middle, scale, float(tensors["reach"]), widening)


REACH = 1.5
"""Times the usual distance (the 99th percentile); sparse corners of the pool are not yet the
unknown. A round number."""
FAR = 1e4
"""Deviations from the middle; what lies farther is as far."""
FARTHEST = 25.0
"""Deviations from the nearest label; what lies farther is no less sure."""
LEAST_APART = 0.1
"""Deviations: labels nearer to each other than this do not say how errors grow with distance."""
WIDENINGS = (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)
"""Of the noise at the usual distance; each about half as much again as the one before."""
USUAL_WIDENING, WIDENING_SPREAD = 0.35, 0.5
"""Where a widening is before labels, and the deviation of its logarithm: what folds of 400 RTX
3090 steps and 630 architectures' memory show on both sides of it. Round numbers."""
_ROWS = 128
"""At once: bounds the memory, not the result."""
MOST_POINTS = 8192
"""Of more labels, so many evenly spaced ones are kept to tell what is near: enough for several of
each architecture that timm has, and few enough to be looked through in less than a millisecond."""


def _wide(points: npt.NDArray[np.float16]) -> tuple[Array, Array]:
    """Points (n, f) as numbers to compute with, and their squared norms (n)."""
    wide = points.astype(np.float64)
    return wide, (wide**2).sum(axis=1)


def _nearest(
    points: npt.NDArray[np.float16],
    others: npt.NDArray[np.float16],
    groups: npt.NDArray[np.int64] | None = None,
    wide: tuple[Array, Array] | None = None,
) -> Array:
    """Distance of each point (n, f) to the nearest of others (m, f), of another group if given."""
    distances = np.full(len(points), np.inf)
    known, squares = _wide(others) if wide is None else wide
    for start in range(0, len(points), _ROWS):
        rows = slice(start, start + _ROWS)
        own = points[rows].astype(np.float64)
        apart = (own**2).sum(axis=1)[:, None] + squares - 2.0 * own @ known.T
        if groups is not None:
            apart[groups[rows][:, None] == groups[None, :]] = np.inf
        if apart.shape[1]:
            distances[rows] = np.sqrt(np.maximum(apart.min(axis=1), 0.0))
    return distances
