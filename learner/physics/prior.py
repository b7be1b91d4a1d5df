"""Physical priors: a formula for one metric, with a few constants that labels refine.

Constants start from specifications, so a prior predicts without any label. A residual model
(`learner.residual`) learns from the prior's features what the formula cannot explain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trappm.learner.workload import Workload

Array = npt.NDArray[np.float64]


TRANSFER_TIGHTNESS = 0.15
"""Factor on how far single constants move between GPUs (`research/priors/step_time.py` prints the
errors from the RTX 3090 to the 4090)."""


class Prior(ABC):
    """Immutable formula of one metric with its constants."""

    transfer_tightness: float = TRANSFER_TIGHTNESS
    """Factor on how far single constants may move from another device's."""
    surprises: bool = False
    """True if labels have upper outliers that the formula cannot explain."""

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

    @abstractmethod
    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        """Return derivatives of the logarithm by the constants, in units of their deviation (n, c).

        The inner products of these rows are the prior's covariance.
        """

    @abstractmethod
    def moved(self, by: Array) -> Self:
        """Return the formula with constants moved by these numbers of deviations (c)."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the constants by name; `from_tensors` is the inverse."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """Read a prior; raise KeyError or ValueError for other tensors."""
