"""Residual of a prior in the logarithm of a metric: one model from two labels to thousands.

A Gaussian process with Student-t noise (`learner.gaussian_process`) is the best at few labels,
boosted trees with absolute error, which see its prediction as a feature, at many. Their weights
have the least relative error of out-of-fold predictions (stacking, Wolpert 1992); all may be 0. A
run out of memory has only a lower bound: a prediction above it has no error.

Memory has upper outliers, the second part of an interval: cuDNN may take an algorithm
whose scratch memory is many times that of its neighbors, and no formula predicts for which batch
sizes. The median stays, and the distribution around it is a mixture of the usual errors and of
outliers. Trees predict the probability of an outlier from the features (out-of-fold scores, made a
probability by isotonic regression, Zadrozny and Elkan 2002). With the distance from the labels, the
mixture changes into the errors of all labels together.

`Trees` are plain arrays, grown by XGBoost, stored and evaluated without it. XGBoost's own bytes
were tried and left: with their statistics they are three times as large, which breaks the wheel's
limit, and a snapshot from elsewhere would be parsed by its C++ code.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.gaussian_process import (
    LEAST_NOISE,
    FoldPredictions,
    GaussianProcess,
    fit_process,
)
from trappm.learner.interface import (
    Array,
    BoolArray,
    FloatArray,
    IntArray,
    joined_tensors,
    with_prefix,
)
from trappm.learner.stats.calibration import LEVELS, Calibration
from trappm.learner.stats.folds import grouped_folds
from trappm.learner.stats.student_t import robust_deviation
from trappm.profiler.errors import InputError

Int32Array = npt.NDArray[np.int32]

ROWS_AT_ONCE = 256
"""Rows per block: larger working arrays leave the cache."""
MAX_DEPTH = 64
"""Largest depth of a stored tree; a deeper one is damaged."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Parameters of XGBoost."""

    rounds: int
    max_depth: int
    learning_rate: float
    subsample: float = 0.7
    column_share: float = 0.5
    """Share of the features, drawn again for each node."""
    least_in_leaf: float = 5.0
    objective: str = "reg:absoluteerror"


@dataclass(frozen=True, eq=False)
class Trees:
    """Boosted models over the same features, with the nodes of all trees in one row."""

    feature: Int32Array
    """Feature that a node splits by (nodes); 0 at leaves."""
    threshold: FloatArray
    """Values below go left (nodes); at leaves the contribution to the prediction."""
    left: Int32Array
    """Index of the left child (nodes); a leaf is its own child."""
    right: Int32Array
    roots: Int32Array
    """Root of each tree, model after model (trees)."""
    first: Int32Array
    """Index of the first tree of each model (models)."""
    start: Array
    """Prediction of each model before its first tree (models)."""
    depth: int

    def predict(self, features: Array) -> Array:
        """Return the predictions (n, models) for rows of features (n, f)."""
        points = features.astype(np.float32)
        predictions = np.empty((len(points), len(self.first)))
        for begin in range(0, len(points), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            predictions[rows] = self._predict(points[rows])
        return predictions

    def _predict(self, features: FloatArray) -> Array:
        at = np.broadcast_to(self.roots, (len(features), len(self.roots)))
        row = np.arange(len(features))[:, None]
        for _ in range(self.depth):
            goes_left = features[row, self.feature[at]] < self.threshold[at]
            at = np.where(goes_left, self.left[at], self.right[at])
        values = self.threshold[at].astype(np.float64)
        summed: Array = np.add.reduceat(values, self.first, axis=1) + self.start
        return summed

    def tensors(self) -> dict[str, Tensor]:
        own = np.arange(len(self.feature), dtype=np.int32)
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays |= {  # small numbers: children are near their parents
            "feature": _narrow(self.feature),
            "left": _narrow(self.left - own),
            "right": _narrow(self.right - own),
        }
        return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read trees; raise KeyError or ValueError for other tensors."""
        arrays: dict[str, Any] = {field.name: tensors[field.name].numpy() for field in fields(cls)}
        depth = int(arrays.pop("depth"))
        nodes = len(arrays["feature"])
        arrays["feature"] = arrays["feature"].astype(np.int32)
        for side in ("left", "right"):
            arrays[side] = arrays[side].astype(np.int32) + np.arange(nodes, dtype=np.int32)
        trees = cls(**arrays, depth=depth)
        inside = [(trees.left, nodes), (trees.right, nodes), (trees.roots, nodes)]
        inside += [(trees.first, len(trees.roots)), (trees.feature, 2**31)]
        if not (
            {trees.threshold.shape, trees.left.shape, trees.right.shape} == {(nodes,)}
            and all(np.all((places >= 0) & (places < end)) for places, end in inside)
            and 0 <= depth <= MAX_DEPTH
        ):
            raise ValueError("the tensors of boosted trees do not fit together")
        return trees


def _narrow(values: Int32Array) -> npt.NDArray[Any]:
    """Return numbers of 0 and more in the smallest type that holds them."""
    most = int(values.max(initial=0))
    return values.astype(np.uint8 if most < 2**8 else np.int16 if most < 2**15 else np.int32)


def join(models: Sequence[Trees]) -> Trees:
    """Return all models side by side."""

    def joined(name: str, sizes: Sequence[int]) -> npt.NDArray[Any]:
        offsets = np.cumsum([0, *sizes], dtype=np.int32)
        parts = [getattr(m, name) + offset for m, offset in zip(models, offsets, strict=False)]
        return np.concatenate(parts)

    nodes, trees = [len(m.feature) for m in models], [len(m.roots) for m in models]
    return Trees(
        feature=np.concatenate([m.feature for m in models]),
        threshold=np.concatenate([m.threshold for m in models]),
        left=joined("left", nodes),
        right=joined("right", nodes),
        roots=joined("roots", nodes),
        first=joined("first", trees),
        start=np.concatenate([m.start for m in models]),
        depth=max(m.depth for m in models),
    )


def grow(features: Array, values: Array, growth: Growth, seed: int) -> Trees:
    """Grow one boosted model.

    Args:
        features: Finite features (n, f).
        values: Values to predict (n).
        growth: Size of the trees.
        seed: Seed of XGBoost's draws of rows and columns, below 2^31.
    """
    import xgboost

    booster = xgboost.train(
        {
            "objective": growth.objective,
            "tree_method": "hist",
            "max_depth": growth.max_depth,
            "eta": growth.learning_rate,
            "subsample": growth.subsample,
            "colsample_bynode": growth.column_share,
            "min_child_weight": growth.least_in_leaf,
            "seed": seed,
            "nthread": 1,
            "verbosity": 0,
        },
        xgboost.DMatrix(features.astype(np.float32), values),
        num_boost_round=growth.rounds,
    )
    learner = json.loads(booster.save_raw("json"))["learner"]  # its "JSON model IO" schema
    trees = [_tree(tree) for tree in learner["gradient_booster"]["model"]["trees"]]
    start = learner["learner_model_param"]["base_score"]
    start = np.array([float(str(start).strip("[]"))])
    return replace(join(trees), first=np.zeros(1, dtype=np.int32), start=start)


def _tree(tree: Mapping[str, Any]) -> Trees:
    """Return one tree of XGBoost's JSON."""
    left, right = (np.array(tree[f"{s}_children"], dtype=np.int32) for s in ("left", "right"))
    leaf = left < 0
    own = np.arange(len(left), dtype=np.int32)
    left, right = (np.where(leaf, own, child) for child in (left, right))
    depth, level = 0, np.zeros(1, dtype=np.int32)
    while len(level := level[~leaf[level]]):
        level = np.concatenate([left[level], right[level]])
        depth += 1
    zero = np.zeros(1, dtype=np.int32)
    return Trees(
        feature=np.where(leaf, 0, np.array(tree["split_indices"])).astype(np.int32),
        threshold=np.array(tree["split_conditions"], dtype=np.float32),
        left=left, right=right, roots=zero, first=zero, start=np.zeros(1), depth=depth,
    )  # fmt: skip


FOLDS = 5
"""Folds of architectures; the usual number."""
REPEATS = 2
"""Divisions into folds that trees are grown on: the median of several is better than one."""
# Round numbers, as all below, judged by `python -m research evaluate` (docs/research/accuracy.md).
GROWTH = Growth(rounds=300, max_depth=5, learning_rate=0.05, least_in_leaf=30.0)
LEAF_SHARE, LEAST_IN_LEAF = 0.02, 5.0
"""Share and least number of the labels in a leaf, which `GROWTH` bounds from above."""
LEAST_FOR_PROCESS, LEAST_FOR_TREES = 6, 40
"""Least number of labels for each member."""
MEMBERS = ("process", "trees")
CAUTION = 5.0
"""Weight of the prior guess that all weights are 0, as a number of labels."""
WEIGHT_STEP = 0.1
"""Step between the weights that are tried."""
UNKNOWN_NOISE, UNKNOWN_VOTES = 0.2, 0.5
"""Deviation of the logarithm without labels, between memory's and step time's, and its weight as a
number of labels next to fewer than `LEAST_FOR_PROCESS`."""


@dataclass(frozen=True, eq=False)
class Residual:
    """A fitted residual."""

    width: int
    """Number of features."""
    process: GaussianProcess | None
    trees: Trees | None
    """Models over the features and the process's prediction; None with few labels."""
    weights: Mapping[str, float]
    """Weight of each of `MEMBERS`."""
    noise: float
    """Robust deviation of the out-of-fold errors."""

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return mean of the residual and deviation of a label (n each) for features (n, f).

        Raises:
            InputError: The number of features differs from training.
        """
        if features.ndim != 2 or features.shape[1] != self.width:
            raise InputError(f"features have shape {features.shape}, not (n, {self.width})")
        mean, variance = np.zeros(len(features)), np.full(len(features), self.noise**2)
        if self.process is not None and len(features):
            of_process, deviation = self.process.predict(features)
            mean += self.weights["process"] * of_process
            variance += deviation**2
            if self.trees is not None and self.weights["trees"]:
                seen = np.column_stack([features, of_process])
                mean += self.weights["trees"] * np.median(self.trees.predict(seen), axis=1)
        return mean, np.sqrt(variance)

    def tensors(self) -> dict[str, Tensor]:
        numbers = [self.width, self.noise, *(self.weights[name] for name in MEMBERS)]
        members = joined_tensors({"process": self.process, "trees": self.trees})
        return {"residual": torch.tensor(numbers, dtype=torch.float64), **members}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Read a residual; raise KeyError or ValueError for other tensors."""
        width, noise, *weights = tensors["residual"].tolist()
        process, trees = with_prefix(tensors, "process."), with_prefix(tensors, "trees.")
        return cls(
            width=int(width),
            process=GaussianProcess.from_tensors(process) if process else None,
            trees=Trees.from_tensors(trees) if trees else None,
            weights=dict(zip(MEMBERS, weights, strict=True)),
            noise=noise,
        )


def fit_residual(
    features: Array,
    log_residual: Array,
    groups: Sequence[str],
    generator: np.random.Generator,
    *,
    feature_groups: Sequence[int] | None = None,
    folds: IntArray | None = None,
    bounds: Array | None = None,
    label_errors: Array | None = None,
) -> tuple[Residual, FoldPredictions]:
    """Fit a residual to n labels; return it with its out-of-fold predictions.

    Args:
        features: Finite features (n, f).
        log_residual: log(measured) minus the prior's logarithm (n), best by a prior that was fitted
            without the label's fold; NaN where only a bound is known.
        groups: Architecture of each label (n).
        generator: Source of all randomness.
        feature_groups: Numbers of columns that the process scales together (default: all).
        folds: Folds of the prior (n; default: drawn here).
        bounds: Lower bounds of unknown values (n), NaN elsewhere.
        label_errors: Standard errors of the values (n; default: 0). They are part of the
            deviations that are returned, so that a noisy label widens no interval.

    Raises:
        InputError: Shapes differ, a value is not finite, or a label has neither value nor bound.
    """
    bounds = np.full(len(features), np.nan) if bounds is None else bounds
    noisy = np.zeros(len(features)) if label_errors is None else label_errors
    widths = (features.shape[-1],) if feature_groups is None else tuple(feature_groups)
    _check(features, log_residual, bounds, groups, widths)
    folds = grouped_folds(groups, FOLDS, generator) if folds is None else folds
    known = ~np.isnan(log_residual)
    unseen: dict[str, Array] = {}
    process, trees = None, None
    spread = np.zeros(len(features))
    if known.sum() >= LEAST_FOR_PROCESS and len(np.unique(folds[known])) > 1:
        process, by_process = fit_process(
            features, log_residual, widths, folds, generator, bounds, noisy
        )
        unseen["process"], spread = by_process.mean, by_process.deviation
    if known.sum() >= LEAST_FOR_TREES and process is not None:
        others = [grouped_folds(groups, FOLDS, generator) for _ in range(REPEATS - 1)]
        seen = np.column_stack([features, unseen["process"]])
        # A bound below the process's prediction teaches nothing.
        telling = known | (bounds > unseen["process"])
        values = np.where(known, log_residual, bounds)
        trees, unseen["trees"] = _grow_across(seen, values, telling, [folds, *others], generator)
    weights = _stack(unseen, log_residual, bounds)
    mean = _weighted(unseen, weights, len(features))
    noise = _noise((log_residual - mean)[known], noisy[known])
    residual = Residual(features.shape[1], process, trees, weights, noise)
    return residual, FoldPredictions(mean, np.hypot(np.hypot(spread, noise), noisy))


def _check(
    features: Array,
    log_residual: Array,
    bounds: Array,
    groups: Sequence[str],
    widths: Sequence[int],
) -> None:
    if features.ndim != 2 or not (
        log_residual.shape == bounds.shape == (len(groups),) == (len(features),)
    ):
        raise InputError(
            f"{features.shape} features, {log_residual.shape} values and {len(groups)} groups "
            "are not one of each for every label"
        )
    numbers = np.where(np.isnan(log_residual), bounds, log_residual)
    if not (np.isfinite(features).all() and np.isfinite(numbers).all()):
        raise InputError("a feature or a residual is not finite")
    if sum(widths) != features.shape[1]:
        raise InputError(f"groups of {widths} columns are not {features.shape[1]} features")


def _grow_across(
    features: Array,
    values: Array,
    telling: BoolArray,
    divisions: Sequence[IntArray],
    generator: np.random.Generator,
) -> tuple[Trees, Array]:
    """Return a model per fold of each division, and median out-of-fold predictions (n).

    Only `telling` labels (n) are learned from.
    """
    leaf = np.clip(LEAF_SHARE * len(values), LEAST_IN_LEAF, GROWTH.least_in_leaf)
    growth = replace(GROWTH, least_in_leaf=leaf)
    models, unseen = [], np.empty((len(divisions), len(values)))
    for number, folds in enumerate(divisions):
        for fold in np.unique(folds):
            out = folds == fold
            rows, seed = telling & ~out, int(generator.integers(2**31))
            models.append(grow(features[rows], values[rows], growth, seed))
            unseen[number, out] = models[-1].predict(features[out])[:, 0]
    return join(models), np.median(unseen, axis=0)


def _stack(unseen: Mapping[str, Array], values: Array, bounds: Array) -> dict[str, float]:
    """Return the weights, at most 1 together, with the least relative out-of-fold error."""

    def error(predicted: Array) -> float:
        above = np.minimum(predicted - bounds, 0.0)
        off = np.where(np.isnan(values), above, predicted - values)
        return float(np.abs(np.expm1(off)).sum())

    names = list(unseen)
    steps = round(1 / WEIGHT_STEP)
    best, lowest = (0,) * len(names), error(np.zeros(len(values)))
    cost = [CAUTION * WEIGHT_STEP * float(np.abs(unseen[name]).mean()) for name in names]
    for counts in itertools.product(range(steps + 1), repeat=len(names)):
        if sum(counts) > steps:
            continue
        shares = {name: n * WEIGHT_STEP for name, n in zip(names, counts, strict=True)}
        penalty = sum(n * c for n, c in zip(counts, cost, strict=True))
        loss = error(_weighted(unseen, shares, len(values))) + penalty
        if loss < lowest:
            best, lowest = counts, loss
    weights = {name: count * WEIGHT_STEP for name, count in zip(names, best, strict=True)}
    return {name: weights.get(name, 0.0) for name in MEMBERS}


def _weighted(unseen: Mapping[str, Array], weights: Mapping[str, float], n: int) -> Array:
    mean = np.zeros(n)
    for name, predicted in unseen.items():
        mean += weights[name] * predicted
    return mean


def _noise(errors: Array, noisy: Array) -> float:
    """Return the robust deviation of errors (n) in addition to the labels' own errors (n).

    Few are completed by `UNKNOWN_NOISE`.
    """
    count = len(errors)
    if not count:
        return UNKNOWN_NOISE
    deviation = max(robust_deviation(errors), LEAST_NOISE)
    shrunk = errors * (deviation / np.hypot(deviation, noisy))
    deviation = max(robust_deviation(shrunk), LEAST_NOISE)
    if count < LEAST_FOR_PROCESS:
        votes = count * deviation**2 + UNKNOWN_VOTES * UNKNOWN_NOISE**2
        return float(np.sqrt(votes / (count + UNKNOWN_VOTES)))
    return deviation


# Round numbers, all of these.
THRESHOLD = 0.08
"""Error of the logarithm above which a label is an outlier: several times the noise."""
LEAST_SURPRISES = 30
"""Least number of outliers to learn from."""
SURPRISE_GROWTH = Growth(
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
            return grow(
                features[rows], truth[rows], SURPRISE_GROWTH, int(generator.integers(2**31))
            )

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
