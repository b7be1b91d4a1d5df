"""Priors that are sums of physical terms with log-normal coefficients.

The prior of a metric is `sum_k exp(theta_k) * term_k`. The terms are in the metric's unit for a
reference device; the coefficients say how a device differs from it. Their log-normal priors keep
them positive and let few labels fit them. A new device starts from the coefficients of a known one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.physics.prior import Prior
from trappm.learner.stats.student_t import map_fit
from trappm.learner.workload import Workload

Array = npt.NDArray[np.float64]

FIRST_SCALE, LEAST_SCALE = 0.3, 0.01
"""Largest and smallest scale of the errors of the logarithm (round numbers)."""


@dataclass(frozen=True)
class TermSpec:
    """Name of a term, and the prior deviation of its log coefficient."""

    name: str
    spread: float


@dataclass(frozen=True)
class PriorSpec:
    """Terms of a metric, and the prior deviation of all log coefficients together."""

    terms: tuple[TermSpec, ...]
    common_spread: float


class TermPrior(Prior):
    """Sum of terms with log-normal coefficients."""

    def __init__(self, spec: PriorSpec, log_constants: Array | None = None) -> None:
        """Create a prior.

        Args:
            spec: Terms and spreads.
            log_constants: Logarithms of the constants (k; default: reference device).
        """
        self.spec = spec
        self.log_constants = np.zeros(len(spec.terms)) if log_constants is None else log_constants
        if self.log_constants.shape != (len(spec.terms),) or not np.all(
            np.isfinite(self.log_constants)
        ):
            raise ValueError(
                f"{len(spec.terms)} terms need as many finite constants, not {self.log_constants}"
            )

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
        # A fit of a dozen constants is fast from any start, so `near` is not needed.
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
        moves: Array = self._shares(self.terms(workloads)) @ self._units()
        return moves

    def moved(self, by: Array) -> Self:
        return self.with_constants(self.log_constants + self._units() @ by)

    def _units(self) -> Array:
        """Return a root of the prior covariance of the constants (k, k)."""
        spreads = np.array([term.spread for term in self.spec.terms])
        root: Array = np.linalg.cholesky(np.diag(spreads**2) + self.spec.common_spread**2).astype(
            np.float64
        )
        return root

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
    middle = np.zeros(len(spec.terms)) if centre is None else centre
    measured = ~np.isnan(log_values)
    targets = log_values
    if log_above is not None:
        targets = np.where(measured, log_values, log_above)
        terms, measured, targets = (a[~np.isnan(targets)] for a in (terms, measured, targets))
    if not measured.any():
        return middle
    spreads = tightness * np.array([term.spread for term in spec.terms])
    root = np.linalg.cholesky(np.diag(spreads**2) + spec.common_spread**2)

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
        is_value=measured, first_scale=FIRST_SCALE, least_scale=LEAST_SCALE,
    )  # fmt: skip
    fitted: Array = middle + root @ x
    return fitted
