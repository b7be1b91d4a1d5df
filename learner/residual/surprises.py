"""The second part of an interval: labels that lie far above what is usual, foretold as a chance.

cuDNN may take an algorithm whose scratch memory is many times that of its neighbours; which batch
sizes it does so at, no formula tells. So the median stays where it is, and the distribution around
it is a mixture: the usual errors, and those of surprises, by a probability that trees learn from
the features of the labels that surprised (out-of-fold, made a probability by isotonic regression,
Zadrozny and Elkan 2002). What surprises in one family says little of another: with the distance
from the labels the mixture gives way to the errors of all labels together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]
from torch import Tensor

from trappm.learner.residual.trees import Growth, Trees, grow
from trappm.learner.stats.calibration import LEVELS, Calibration
from trappm.learner.tensors import with_prefix

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

THRESHOLD = 0.08
"""An error of the logarithm above this is a surprise: a round number, several times the noise."""
LEAST_SURPRISES = 30
"""With fewer there is nothing to learn what they have in common from; a round number."""
GROWTH = Growth(
    rounds=60, max_depth=3, learning_rate=0.1, least_in_leaf=10.0, objective="reg:squarederror"
)
BOUNDS = 0.002, 0.9
"""Of a probability: no label is sure to surprise, or not to."""
REACH = 2.0
"""Times the usual distance between architectures, where the mixture has given way by 1 - 1/e."""


@dataclass(frozen=True, eq=False)
class Surprises:
    """What is known of labels far above the usual, to be mixed into a calibration."""

    trees: Trees
    scores: Array
    """What the trees say (s), rising, and beside it how often that surprised (s)."""
    shares: Array
    usual: Calibration
    """Of errors that are no surprises, in units of the stated deviation."""
    surprising: Calibration
    """Of surprises, in units of the logarithm."""
    reach: float
    """The distance from labels at which the mixture gives way."""

    @classmethod
    def fit(
        cls,
        features: Array,
        errors: Array,
        deviations: Array,
        groups: Sequence[str],
        folds: IntArray,
        known: npt.NDArray[np.bool_],
        distance: float,
        generator: np.random.Generator,
    ) -> Self | None:
        """From the features (n, f) and errors of n labels by models that have not seen their fold.

        Args:
            features, errors, deviations, groups, known: as `Calibration.fit`.
            folds: of each label (n).
            distance: the usual one between architectures.
            generator: seeds the trees.

        Returns:
            None where too few labels surprise.
        """
        surprising = known & (errors > THRESHOLD)
        if surprising.sum() < LEAST_SURPRISES:
            return None
        truth = surprising.astype(np.float64)
        held_out = [folds == fold for fold in np.unique(folds)]
        nobody = np.zeros(len(errors), dtype=bool)
        parts = [(out, int(generator.integers(2**31))) for out in (*held_out, nobody)]

        def grown(part: tuple[npt.NDArray[np.bool_], int]) -> Trees:
            rows = known & ~part[0]
            return grow(features[rows], truth[rows], GROWTH, part[1])

        *of_folds, trees = map(grown, parts)
        scores = np.zeros(len(errors))
        for out, model in zip(held_out, of_folds, strict=True):
            scores[out] = model.predict(features[out])[:, 0]
        order = np.argsort(scores[known], kind="stable")
        shares = isotonic_regression(truth[known][order]).x
        points, place = np.unique(scores[known][order], return_index=True)
        rest = ~surprising
        names = np.array(groups)
        return cls(
            trees=trees,
            scores=points,
            shares=np.clip(shares[place], *BOUNDS),
            usual=Calibration.fit(
                errors[rest], deviations[rest], names[rest].tolist(), known[rest]
            ),
            surprising=Calibration(np.quantile(errors[surprising], LEVELS)),
            reach=REACH * distance,
        )

    def probability(self, features: Array, distance: Array) -> tuple[Array, Array]:
        """Of a surprise (n), and the weight of the mixture against all errors together (n)."""
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
        """Of n values as `Calibration.log_quantiles`, of the mixture (n, levels)."""
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
        """The probability of an error of the logarithm above `gap` (n)."""
        usual, all_errors = (c.exceeding(gap / deviations) for c in (self.usual, everything))
        mixed = (1.0 - chance) * usual + chance * self.surprising.exceeding(gap)
        probability: Array = weight * mixed + (1.0 - weight) * all_errors
        return probability

    def tensors(self) -> dict[str, Tensor]:
        return {
            **{f"trees.{k}": v for k, v in self.trees.tensors().items()},
            "scores": torch.from_numpy(self.scores.copy()),
            "shares": torch.from_numpy(self.shares.copy()),
            **{f"usual.{k}": v for k, v in self.usual.tensors().items()},
            **{f"surprising.{k}": v for k, v in self.surprising.tensors().items()},
            "reach": torch.tensor(self.reach, dtype=torch.float64),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of surprises."""
        scores, shares = tensors["scores"].numpy(), tensors["shares"].numpy()
        reach = float(tensors["reach"])
        rising = np.all(np.diff(scores) > 0) and np.all(np.diff(shares) >= 0)
        if scores.ndim != 1 or scores.shape != shares.shape or not len(scores) or not rising:
            raise ValueError("the probabilities of surprises do not rise with their scores")
        if not (shares[0] >= 0.0 and shares[-1] <= 1.0 and 0.0 < reach < np.inf):
            raise ValueError("a probability of surprises is none, or their reach is not positive")
        return cls(
            Trees.from_tensors(with_prefix(tensors, "trees.")),
            scores,
            shares,
            Calibration.from_tensors(with_prefix(tensors, "usual.")),
            Calibration.from_tensors(with_prefix(tensors, "surprising.")),
            reach,
        )
