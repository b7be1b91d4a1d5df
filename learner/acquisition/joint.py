"""Prior and residual as one Gaussian process: a quick learner for few labels, and what it believes.

    log value = prior(constants) + residual,   covariance = J J^T + Matern 3/2 over groups

J says how far the prior moves with each of its constants in units of how uncertain that is
(`Prior.sensitivities`), so constants and residual are learned together, without folds: Gauss-Newton
steps (the prior is linearised anew around its constants), and Student-t noise by reweighting. The
residual stands on the features of the prior's groups; its amplitude and the lengths are chosen by
the evidence.

`head` says more at many labels; this fits hundreds of times in a bench, and its covariance is what
acquisition reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from trappm.learner.acquisition.covariance import Covariance, FloatArray, narrow
from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.physics.prior import Prior
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError

Array = npt.NDArray[np.float64]

DEGREES_OF_FREEDOM = 4.0
RELEVANCES = (0.12, 0.25, 0.5)
"""Inverse lengths that are tried, where each group has a mean squared norm of 1."""
AMPLITUDES = (0.03, 0.08, 0.16, 0.3)
"""Deviations of the residual that are tried, in the logarithm."""
LINEAR_SHARE = 0.4
"""Deviation of the residual's linear part over that of its smooth part."""
FIRST_NOISE = 0.08
LEAST_NOISE = 0.004
LINEARISATIONS = 3
REWEIGHTINGS = 6
MOST_STEP = 1.0
"""Spreads that a constant moves at most between two linearisations."""
CLIP = 5.0
LANDMARKS = 256


@dataclass(frozen=True, eq=False)
class Ground:
    """Where workloads stand: the pool's scale for the prior's features."""

    middle: Array
    scale: Array
    groups: tuple[int, ...]
    _known: WeakKeyDictionary[Workload, Array] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    @classmethod
    def of(cls, prior: Prior, workloads: Sequence[Workload]) -> Ground:
        """The ground of a pool, from the prior without labels: it needs no label either."""
        features = prior.features(workloads)
        groups = prior.feature_groups
        deviation = features.std(axis=0)
        norms = np.repeat(np.sqrt(groups), groups)
        scale = np.where(deviation < 1e-9, np.inf, deviation * norms)
        return cls(features.mean(axis=0), scale, groups)

    def points(self, prior: Prior, workloads: Sequence[Workload]) -> Array:
        """(n, c), by the prior that the ground was made with."""
        new = [w for w in workloads if w not in self._known]
        if new:
            features = prior.features(new)
            bound = CLIP / np.repeat(np.sqrt(self.groups), self.groups)
            rows = np.clip((features - self.middle) / self.scale, -bound, bound)
            self._known.update(zip(new, rows, strict=True))
        found: Array = np.array([self._known[w] for w in workloads]).reshape(-1, len(self.middle))
        return found


@dataclass(frozen=True)
class _Smooth:
    """The residual's covariance."""

    relevance: float
    amplitude: float

    def between(self, first: Array, second: Array) -> Array:
        squares = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)[None, :]
        inner = first @ second.T
        distance = self.relevance * np.sqrt(3.0 * np.maximum(squares - 2.0 * inner, 0.0))
        found: Array = self.amplitude**2 * (
            (1.0 + distance) * np.exp(-distance) + LINEAR_SHARE**2 * inner
        )
        return found


@dataclass(frozen=True, eq=False)
class JointModel:
    """A fitted process."""

    start: Prior
    """Without labels, on which the ground stands."""
    prior: Prior
    """With its constants moved; around these it is taken to be linear."""
    shift: Array
    """How much farther the constants are to move (k); the formula itself may be far from linear
    there, and its linear form is what was fitted."""
    ground: Ground
    smooth: _Smooth
    noise: float
    seen: Array
    """Points of the labels (m, c)."""
    weights: Array
    """Of the residual's covariance with each label (m)."""
    sensitivities: Array
    """Of the labels (m, k)."""
    solved: Array
    """Inverse of the labels' covariance with their noise (m, m)."""

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        points = self.ground.points(self.start, workloads)
        across = self.smooth.between(points, self.seen)
        moves = self.prior.sensitivities(workloads)
        middle = self.prior.log_values(workloads) + moves @ self.shift + across @ self.weights
        across += moves @ self.sensitivities.T
        own = (moves**2).sum(axis=1) + self.smooth.amplitude**2 * (
            1.0 + LINEAR_SHARE**2 * (points**2).sum(axis=1)
        )
        explained = np.einsum("nm,mk,nk->n", across, self.solved, across)
        variance = np.maximum(own - explained, 0.0)
        deviation = np.sqrt(variance + self.noise**2)
        return Estimate(
            median=np.exp(middle),
            low=np.exp(middle - 1.9 * deviation),
            high=np.exp(middle + 1.9 * deviation),
            log_std=deviation,
            log_std_of_mean=np.sqrt(variance),
        )

    def gradients(self, workloads: Sequence[Workload]) -> FloatArray:
        """Of the predicted logarithm by all that the process can learn (n, at most `WIDTH`)."""
        return narrow(self.covariance(workloads, np.random.default_rng(0)).features)

    def covariance(
        self, workloads: Sequence[Workload], generator: np.random.Generator
    ) -> Covariance:
        """Of a pool before any label, with the constants as they are now."""
        points = self.ground.points(self.start, workloads)
        chosen = np.sort(generator.permutation(len(points))[:LANDMARKS])
        inner = self.smooth.between(points[chosen], points[chosen])
        values, vectors = np.linalg.eigh(inner)
        keep = values > 1e-9 * max(float(values[-1]), 1e-12)
        root = vectors[:, keep] / np.sqrt(values[keep])
        smooth = self.smooth.between(points, points[chosen]) @ root
        features = np.hstack([self.prior.sensitivities(workloads), smooth])
        return Covariance(features.astype(np.float32), self.noise**2)


class Joint:
    """The estimator; `ground` is made from the pool, which needs no labels."""

    def __init__(self, prior: Prior, ground: Ground, name: str = "joint") -> None:
        self.prior, self.ground, self.name = prior, ground, name

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> JointModel:
        """Fits a process; without labels it says what the prior says.

        Raises:
            InputError: a start, which this estimator cannot use.
        """
        if start is not None:
            raise InputError("this quick estimator starts from no other model; use ours")
        del generator  # nothing here is random
        log_values, log_above = np.log(targets.values), np.log(targets.above)
        points = self.ground.points(self.prior, workloads)
        smooth = _Smooth(RELEVANCES[-1], AMPLITUDES[1])
        start_prior = self.prior.suited(workloads, log_values)
        width = start_prior.sensitivities([]).shape[1]
        prior, moved, shift = start_prior, np.zeros(width), np.zeros(width)
        rows: list[int] = []
        state = _State.empty(width)
        for number in range(LINEARISATIONS if len(workloads) else 0):
            moved = moved + np.clip(shift, -MOST_STEP, MOST_STEP)
            prior = start_prior.moved(moved)
            said = prior.log_values(workloads)
            # Of a run that died only a bound is known: it pulls while the prior stays below it.
            gaps = np.where(np.isnan(log_values), log_above - said, log_values - said)
            rows = np.flatnonzero(~np.isnan(log_values) | (gaps > 0)).tolist()
            moves = prior.sensitivities([workloads[i] for i in rows])
            asked = gaps[rows] + moves @ moved
            if number == LINEARISATIONS - 1:
                groups = [targets.groups[i] for i in rows]
                smooth = _choose(state, moves, points[rows], asked, groups)
            state = _solve(moves, smooth.between(points[rows], points[rows]), asked)
            shift = moves.T @ state.weights - moved
        return JointModel(
            start=self.prior,
            prior=prior,
            shift=shift,
            ground=self.ground,
            smooth=smooth,
            noise=state.noise,
            seen=points[rows],
            weights=state.weights,
            sensitivities=state.moves,
            solved=state.solved,
        )


@dataclass(frozen=True, eq=False)
class _State:
    """A process with Student-t noise, as its labels determine it."""

    moves: Array
    weights: Array
    solved: Array
    precision: Array
    noise: float

    @classmethod
    def empty(cls, width: int) -> _State:
        nothing = np.zeros(0)
        return cls(np.zeros((0, width)), nothing, np.zeros((0, 0)), nothing, FIRST_NOISE)


def _solve(moves: Array, smooth: Array, asked: Array) -> _State:
    """The process of m labels; noise by reweighting (Tipping and Lawrence 2005)."""
    covariance: Array = np.asarray(moves @ moves.T + smooth, dtype=np.float64)
    dof, noise = DEGREES_OF_FREEDOM, FIRST_NOISE
    precision = np.full(len(asked), 1.0 / noise**2)
    solved, weights = covariance, asked
    for _ in range(REWEIGHTINGS):
        solved = _inverse(covariance + np.diag(1.0 / precision))
        weights = solved @ asked
        # Squares of the errors and their variance (Rasmussen and Williams 2006, section 5.4.2).
        squares = (weights / precision) ** 2 + (1.0 - np.diag(solved) / precision) / precision
        votes = (dof + 1.0) / (dof + squares / noise**2)
        total = float((votes * squares).sum()) + 2.0 * FIRST_NOISE**2
        noise = max(float(np.sqrt(total / (len(asked) + 2.0))), LEAST_NOISE)
        precision = (dof + 1.0) / (dof * noise**2 + squares)
    return _State(moves, weights, solved, precision, noise)


def _choose(
    state: _State, moves: Array, points: Array, asked: Array, groups: Sequence[str]
) -> _Smooth:
    """The residual's covariance with the most probable labels, each without its architecture.

    The votes of the labels are those that an earlier state has given, as long as it has them all.
    """
    if len(state.precision) != len(asked):
        state = _solve(moves, _Smooth(RELEVANCES[-1], AMPLITUDES[1]).between(points, points), asked)
    prior = moves @ moves.T + np.diag(1.0 / state.precision)
    tried = [_Smooth(r, a) for a in AMPLITUDES for r in RELEVANCES]
    losses = []
    for one in tried:
        solved = _inverse(prior + one.between(points, points))
        there = _State(moves, solved @ asked, solved, state.precision, state.noise)
        losses.append(_unseen_loss(there, asked, groups))
    return tried[int(np.argmin(losses))]


def _unseen_loss(state: _State, asked: Array, groups: Sequence[str]) -> float:
    """Negative log probability (Student-t) of each architecture's labels without them."""
    names = np.array(groups)
    dof, total = DEGREES_OF_FREEDOM, 0.0
    for name in np.unique(names):
        own = np.flatnonzero(names == name)
        block = _inverse(state.solved[np.ix_(own, own)])
        errors = block @ state.weights[own]
        variance = np.maximum(np.diag(block) - 1.0 / state.precision[own], 0.0)
        scale = np.sqrt(variance + state.noise**2)
        losses = np.log(scale) + 0.5 * (dof + 1.0) * np.log1p((errors / scale) ** 2 / dof)
        total += float(losses.sum())
    return total


def _inverse(matrix: Array) -> Array:
    found: Array = np.asarray(np.linalg.inv(matrix), dtype=np.float64)
    return found
