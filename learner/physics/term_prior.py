"""Priors that are sums of physical terms with log-normal constants: `sum_k exp(theta_k) * term_k`.

`graph_terms` has how such a sum is fitted. A prior of this kind is its terms, their spreads,
and the features that a residual should see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.physics.graph_terms import PriorSpec, fit_coefficients, log_prior
from trappm.learner.physics.prior import TRANSFER_TIGHTNESS
from trappm.learner.workload import Workload

Array = npt.NDArray[np.float64]


class TermPrior(ABC):
    """See `learner.physics.prior.Prior`. Instances do not change."""

    transfer_tightness: float = TRANSFER_TIGHTNESS
    surprises: bool = False

    def __init__(self, spec: PriorSpec, log_constants: Array | None = None) -> None:
        """With the logarithms of the constants (k); by default those of the reference device."""
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
        """What is summed, in the metric's unit for the reference device (n, k); rows not all 0."""

    @abstractmethod
    def with_constants(self, log_constants: Array) -> Self: ...

    @abstractmethod
    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """`features`, of workloads with these logarithms (n) and shares of the terms (n, k)."""

    def log_values(self, workloads: Sequence[Workload]) -> Array:
        return log_prior(self.terms(workloads), self.log_constants)

    def features(self, workloads: Sequence[Workload]) -> Array:
        return self.logs_and_features(workloads)[1]

    def logs_and_features(self, workloads: Sequence[Workload]) -> tuple[Array, Array]:
        terms = self.terms(workloads)
        logs = log_prior(terms, self.log_constants)
        return logs, self.features_of(workloads, logs, self._shares(terms))

    def _shares(self, terms: Array) -> Array:
        """What part of the sum each term is (n, k)."""
        parts = terms * np.exp(self.log_constants)
        shares: Array = parts / parts.sum(axis=1, keepdims=True)
        return shares

    def started_from(self, other: Self) -> Self:
        return self.with_constants(other.log_constants)

    def suited(self, workloads: Sequence[Workload], log_values: Array) -> Self:
        del workloads, log_values  # there is one variant only
        return self

    def refit(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        *,
        log_above: Array | None = None,
        tightness: float = 1.0,
        near: Self | None = None,
    ) -> Self:
        # A dozen constants are found in no time from anywhere: `near` changes nothing.
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
        """The share of a term is how far the logarithm moves with that of its constant."""
        moves: Array = self._shares(self.terms(workloads)) @ self._units()
        return moves

    def moved(self, by: Array) -> Self:
        return self.with_constants(self.log_constants + self._units() @ by)

    def _units(self) -> Array:
        """A root of the prior covariance of the constants (k, k)."""
        spreads = np.array([term.spread for term in self.spec.terms])
        root: Array = np.linalg.cholesky(np.diag(spreads**2) + self.spec.common_spread**2).astype(
            np.float64
        )
        return root

    def tensors(self) -> dict[str, Tensor]:
        return {"log_constants": torch.from_numpy(self.log_constants.copy())}
