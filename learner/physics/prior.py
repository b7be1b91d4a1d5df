"""Physical priors: a formula for one metric, with a few constants that labels refine.

Constants start from specifications, so a prior predicts without any label. A residual model
(`learner.heads.physics_heads`) learns from the prior's features what the formula cannot explain.

Most priors are `TermPrior`s: `sum_k exp(theta_k) * term_k`. The terms are in the metric's unit for
a reference device; the coefficients say how a device differs from it. Their log-normal priors keep
them positive and let few labels fit them. A new device starts from the coefficients of a known one.

Several priors have the shares of operators as features: models of one family have similar errors,
and operators identify a family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trappm.learner.interface import Array, Workload
from trappm.learner.stats.student_t import map_fit
from trappm.profiler.records import Graph

TRANSFER_TIGHTNESS = 0.15
"""Factor on how far single constants move between GPUs; chosen from the RTX 3090 to the 4090
(docs/research/accuracy.md)."""
FIRST_SCALE, MIN_SCALE = 0.3, 0.01
"""Largest and smallest scale of the errors of the logarithm of a `TermPrior` (round numbers)."""


UPDATE_SHARE = 0.03
"""Share of the optimizer in a training step whose kernels are unknown; a round number."""


class Prior(ABC):
    """Immutable formula of one metric with its constants."""

    transfer_tightness: float = TRANSFER_TIGHTNESS
    """Factor on how far single constants may move from another device's."""

    @property
    @abstractmethod
    def feature_groups(self) -> tuple[int, ...]:
        """Numbers of neighboring columns of `features` that are scaled together, in order."""

    @abstractmethod
    def log_values(self, workloads: Sequence[Workload]) -> Array:
        """Return the logarithm of the metric in its unit (n)."""

    @abstractmethod
    def logs_and_features(self, workloads: Sequence[Workload]) -> tuple[Array, Array]:
        """Return `log_values` (n) and `features` (n, f), which share most of their work."""

    def features(self, workloads: Sequence[Workload]) -> Array:
        """Return finite features for a residual, such as shares of terms (n, f)."""
        return self.logs_and_features(workloads)[1]

    @abstractmethod
    def started_from(self, other: Self) -> Self:
        """Return the formula for this device with the constants of another's."""

    @abstractmethod
    def refit(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        *,
        log_above: Array | None = None,
        tightness: float = 1.0,
        near: Self | None = None,
    ) -> Self:
        """Return the formula with constants fitted to labels; their prior is centered here.

        Args:
            workloads: Labelled workloads (n).
            log_values: Logarithms of the measured values (n); NaN where only a bound is known.
            log_above: Logarithms of lower bounds (n), from runs out of memory; NaN elsewhere.
            tightness: Factor on how far constants may move, below 1 for a well-known start.
            near: The fit to these labels and those of a held-out fold. It decides the variant and
                how far constants may move. The search still starts here: from constants that have
                seen the fold, errors on it would look too small.
        """

    def pass_share(self, workloads: Sequence[Workload]) -> Array:
        """Return the share of a training step that its forward and backward pass take (n).

        For priors of step time. Gradient accumulation repeats this share; the rest is the
        optimizer's step.
        """
        passes = [replace(w, scope=replace(w.scope, updates=False)) for w in workloads]
        share: Array = np.exp(self.log_values(passes) - self.log_values(workloads))
        return share

    @abstractmethod
    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        """Return derivatives of the logarithm by the constants, in units of their deviation (n, c).

        The inner products of these rows are the prior's covariance.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the constants by name; `from_tensors` is the inverse."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """Read a prior; raise KeyError or ValueError for other tensors."""


@dataclass(frozen=True)
class PriorSpec:
    """Prior deviations of the log coefficients of a metric's terms."""

    spreads: Mapping[str, float]
    """Deviation of each by name of its term, in order."""
    common_spread: float
    """Deviation of all together."""

    def root(self, tightness: float = 1.0) -> Array:
        """Return a root of the prior covariance (k, k); `tightness` is a factor on the spreads."""
        spreads = tightness * np.array(list(self.spreads.values()))
        covariance = np.diag(spreads**2) + self.common_spread**2
        return np.linalg.cholesky(covariance).astype(np.float64)


class TermPrior(Prior):
    """Sum of terms with log-normal coefficients."""

    def __init__(self, spec: PriorSpec, log_constants: Array | None = None) -> None:
        """Create a prior.

        Args:
            spec: Terms and spreads.
            log_constants: Logarithms of the constants (k; default: reference device).
        """
        self.spec = spec
        count = len(spec.spreads)
        self.log_constants = np.zeros(count) if log_constants is None else log_constants
        if self.log_constants.shape != (count,) or not np.isfinite(self.log_constants).all():
            raise ValueError(f"{count} terms need as many finite constants, not {log_constants}")

    @abstractmethod
    def terms(self, workloads: Sequence[Workload]) -> Array:
        """Return the terms in the metric's unit on the reference device (n, k); no row is all 0."""

    @abstractmethod
    def with_constants(self, log_constants: Array) -> Self: ...

    @abstractmethod
    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """Return `features` from the logarithms (n) and shares of the terms (n, k)."""

    def log_values(self, workloads: Sequence[Workload]) -> Array:
        return log_prior(self.terms(workloads), self.log_constants)

    def logs_and_features(self, workloads: Sequence[Workload]) -> tuple[Array, Array]:
        terms = self.terms(workloads)
        logs = log_prior(terms, self.log_constants)
        return logs, self.features_of(workloads, logs, self._shares(terms))

    def _shares(self, terms: Array) -> Array:
        """Return the share of each term in the sum (n, k)."""
        parts = terms * np.exp(self.log_constants)
        shares: Array = parts / parts.sum(axis=1, keepdims=True)
        return shares

    def started_from(self, other: Self) -> Self:
        return self.with_constants(other.log_constants)

    def refit(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        *,
        log_above: Array | None = None,
        tightness: float = 1.0,
        near: Self | None = None,
    ) -> Self:
        variant = self.variant(workloads, log_values, tightness, near)
        return variant.fitted(workloads, log_values, log_above, tightness)

    def variant(
        self, workloads: Sequence[Workload], log_values: Array, tightness: float, near: Self | None
    ) -> Self:
        """Return the variant of the formula to fit, with constants as here; see `refit`."""
        return self

    def fitted(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        log_above: Array | None,
        tightness: float,
    ) -> Self:
        """Return this variant of the formula, fitted; see `refit`."""
        return self.with_constants(
            fit_coefficients(
                self.terms(workloads),
                log_values,
                self.spec,
                centre=self.log_constants,
                tightness=tightness,
                log_above=log_above,
            )
        )

    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        """Return the derivatives, the shares of the terms, in units of deviations (n, c)."""
        return self._shares(self.terms(workloads)) @ self.spec.root()

    def tensors(self) -> dict[str, Tensor]:
        return {"log_constants": torch.from_numpy(self.log_constants.copy())}


def log_prior(terms: Array, coefficients: Array) -> Array:
    """Return log(sum_k exp(theta_k) * term_k) (n) for terms (n, k) and log coefficients (k)."""
    values: Array = np.log(terms @ np.exp(coefficients))
    return values


def fit_coefficients(
    terms: Array,
    log_values: Array,
    spec: PriorSpec,
    *,
    centre: Array | None = None,
    tightness: float = 1.0,
    log_above: Array | None = None,
) -> Array:
    """Return the most probable log coefficients theta (k) of `sum_k exp(theta_k) * term_k`.

    Errors of the logarithm are Student-t. A lower bound has no effect where the sum exceeds it.

    Args:
        terms: Terms (n, k).
        log_values: Logarithms of the measured values (n); NaN where only a bound is known.
        spec: Priors of the coefficients.
        centre: Center of the prior of theta (default: reference device).
        tightness: Factor on the spread of single coefficients, below 1 for a well-known center.
        log_above: Logarithms of lower bounds (n), where the value is not known.
    """
    middle = np.zeros(len(spec.spreads)) if centre is None else centre
    measured = ~np.isnan(log_values)
    targets = log_values
    if log_above is not None:
        targets = np.where(measured, log_values, log_above)
        terms, measured, targets = (a[~np.isnan(targets)] for a in (terms, measured, targets))
    if not measured.any():
        return middle
    root = spec.root(tightness)

    def parts(x: Array) -> Array:
        """Return each term times its coefficient (n, k)."""
        values: Array = terms * np.exp(middle + root @ x)
        return values

    def errors(x: Array) -> Array:
        gaps: Array = targets - np.log(parts(x).sum(axis=1))
        return np.where(measured, gaps, np.maximum(gaps, 0.0))

    def jacobian(x: Array) -> Array:
        own = parts(x)
        counts = measured | (errors(x) > 0)
        derivatives: Array = -(own * counts[:, None] / own.sum(axis=1, keepdims=True)) @ root
        return derivatives

    # All coefficients at once first: the level of a new device may be off by a factor of 1000.
    level = float(np.median((targets - log_prior(terms, middle))[measured]))
    level *= spec.common_spread**2 / (spec.common_spread**2 + 0.1)
    start = np.linalg.solve(root, np.full(len(middle), level))
    x = map_fit(
        errors, jacobian, start,
        is_value=measured, first_scale=FIRST_SCALE, least_scale=MIN_SCALE,
    )  # fmt: skip
    fitted: Array = middle + root @ x
    return fitted


OPERATORS = (
    "Conv", "MatMul", "Gemm", "Einsum", "Attention", "LSTM",
    "BatchNormalization", "LayerNormalization", "GroupNormalization",
    "Relu", "Sigmoid", "HardSwish", "HardSigmoid", "Gelu", "Erf", "Tanh", "Softmax", "Clip",
    "Add", "Mul", "Div", "Pow", "ReduceMean", "MaxPool", "AveragePool", "GlobalAveragePool",
    "Transpose", "Concat", "Slice", "Split", "Gather", "Resize",
)  # fmt: skip
"""Operators that distinguish families of models."""


def operator_shares(graph: Graph) -> list[float]:
    """Return the share of each of `OPERATORS` in the nodes (32)."""
    counts = Counter(graph.operators)
    return [counts[operator] / max(graph.node_count, 1) for operator in OPERATORS]
