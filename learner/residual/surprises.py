"""Upper outliers of memory: the second part of an interval.

cuDNN may take an algorithm whose scratch memory is many times that of its neighbors, and no formula
predicts for which batch sizes. The median stays, and the distribution around it is a mixture of the
usual errors and of outliers. Trees predict the probability of an outlier from the features
(out-of-fold scores, made a probability by isotonic regression, Zadrozny and Elkan 2002). With the
distance from the labels, the mixture changes into the errors of all labels together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.estimator import joined_tensors, with_prefix
from trappm.learner.residual.trees import Growth, Trees, grow
from trappm.learner.stats.calibration import LEVELS, Calibration
from trappm.learner.workload import Array, BoolArray, IntArray

# Round numbers, all of these.
THRESHOLD = 0.08
"""Error of the logarithm above which a label is an outlier: several times the noise."""
LEAST_SURPRISES = 30
"""Least number of outliers to learn from."""
GROWTH = Growth(
    rounds=60, max_depth=3, learning_rate=0.1, least_in_leaf=10.0, objective="reg:squarederror"
)
BOUNDS = 0.002, 0.9
"""Bounds of a probability."""
REACH = 2.0
"""Distance, over the usual one between architectures, at which the mixture has a share of 1 / e."""


@dataclass(frozen=True, eq=False)
class Surprises:
    """Probability and size of outliers, to be mixed into a calibration."""

    trees: Trees
    scores: Array
    """Scores of the trees (s), rising."""
    shares: Array
    """Share of outliers at each score (s)."""
    usual: Calibration
    """Errors that are not outliers, in units of the stated deviation."""
    surprising: Calibration
    """Outliers, in units of the logarithm."""
    reach: float
    """Distance from the labels at which the mixture has a share of 1 / e."""

    @classmethod
    def fit(
        cls,
        features: Array,
        errors: Array,
        deviations: Array,
        groups: Sequence[str],
        folds: IntArray,
        known: BoolArray,
        distance: float,
        generator: np.random.Generator,
    ) -> Self | None:
        """Fit to the out-of-fold errors of n labels; None if there are too few outliers.

        Args:
            features, folds: Features (n, f) and fold of each label (n).
            errors, deviations, groups, known: As for `Calibration.fit`.
            distance: Usual distance between architectures.
            generator: Seeds the trees.
        """
        surprising = known & (errors > THRESHOLD)
        if surprising.sum() < LEAST_SURPRISES:
            return None
        from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

        truth = surprising.astype(np.float64)

        def grown(out: BoolArray) -> Trees:
            rows = known & ~out
            return grow(features[rows], truth[rows], GROWTH, int(generator.integers(2**31)))

        scores = np.zeros(len(errors))
        for out in (folds == fold for fold in np.unique(folds)):
            scores[out] = grown(out).predict(features[out])[:, 0]
        order = np.argsort(scores[known], kind="stable")
        shares = isotonic_regression(truth[known][order]).x
        points, place = np.unique(scores[known][order], return_index=True)
        rest = ~surprising
        own = np.array(groups)[rest].tolist()
        return cls(
            trees=grown(np.zeros(len(errors), dtype=bool)),
            scores=points,
            shares=np.clip(shares[place], *BOUNDS),
            usual=Calibration.fit(errors[rest], deviations[rest], own, known[rest]),
            surprising=Calibration(np.quantile(errors[surprising], LEVELS)),
            reach=REACH * distance,
        )

    def probability(self, features: Array, distance: Array) -> tuple[Array, Array]:
        """Return the probability of an outlier (n) and the weight of the mixture (n)."""
        chance = np.interp(self.trees.predict(features)[:, 0], self.scores, self.shares)
        return chance, np.exp(-((distance / self.reach) ** 2))

    def log_quantiles(
        self,
        everything: Calibration,
        middle: Array,
        deviations: Array,
        chance: Array,
        weight: Array,
    ) -> Array:
        """Return the quantiles of the mixture (n, levels), as `Calibration.log_quantiles`."""
        result = np.empty((len(middle), len(LEVELS)))
        for row, (deviation, p, w) in enumerate(zip(deviations, chance, weight, strict=True)):
            parts = (
                ((1.0 - p) * w, deviation * self.usual.quantiles),
                (p * w, self.surprising.quantiles),
                (1.0 - w, deviation * everything.quantiles),
            )
            points = np.unique(np.concatenate([quantiles for _, quantiles in parts]))
            below = sum(
                share * np.interp(points, quantiles, LEVELS, left=0.0, right=1.0)
                for share, quantiles in parts
            )
            result[row] = middle[row] + np.interp(LEVELS, below, points)
        return result

    def exceeding(
        self,
        everything: Calibration,
        gap: Array,
        deviations: Array,
        chance: Array,
        weight: Array,
    ) -> Array:
        """Return the probability of an error of the logarithm above `gap` (n)."""
        usual, all_errors = (c.exceeding(gap / deviations) for c in (self.usual, everything))
        mixed = (1.0 - chance) * usual + chance * self.surprising.exceeding(gap)
        probability: Array = weight * mixed + (1.0 - weight) * all_errors
        return probability

    def tensors(self) -> dict[str, Tensor]:
        return {
            **joined_tensors(
                {"trees": self.trees, "usual": self.usual, "surprising": self.surprising}
            ),
            "scores": torch.from_numpy(self.scores.copy()),
            "shares": torch.from_numpy(self.shares.copy()),
            "reach": torch.tensor(self.reach, dtype=torch.float64),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read the record; raise KeyError or ValueError for other tensors."""
        scores, shares = tensors["scores"].numpy(), tensors["shares"].numpy()
        reach = float(tensors["reach"])
        rising = np.all(np.diff(scores) > 0) and np.all(np.diff(shares) >= 0)
        if scores.ndim != 1 or scores.shape != shares.shape or not len(scores) or not rising:
            raise ValueError("the probabilities of outliers do not rise with their scores")
        if not (shares[0] >= 0.0 and shares[-1] <= 1.0 and 0.0 < reach < np.inf):
            raise ValueError("outlier probabilities must lie in [0, 1], and the reach above 0")
        return cls(
            Trees.from_tensors(with_prefix(tensors, "trees.")),
            scores,
            shares,
            Calibration.from_tensors(with_prefix(tensors, "usual.")),
            Calibration.from_tensors(with_prefix(tensors, "surprising.")),
            reach,
        )
