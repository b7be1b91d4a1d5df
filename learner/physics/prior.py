"""What a physical prior is: a formula for one metric with a few constants that labels refine.

A prior knows something without any label (constants from specifications), little data moves its
constants, and what it cannot explain is left to a residual model (`learner.residual`), which
learns from the prior's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trappm.learner.workload import Workload

Array = npt.NDArray[np.float64]


TRANSFER_TIGHTNESS = 0.15
"""On a new GPU single constants of a prior move this much less than on an unknown one. What the
transfer from the RTX 3090 to the 4090 reaches, `research/priors/step_time.py` prints."""


class Prior(Protocol):
    """One metric's formula with its constants. Instances do not change."""

    @property
    def transfer_tightness(self) -> float:
        """How much less single constants may move where they start from another device's."""
        ...

    @property
    def surprises(self) -> bool:
        """Whether labels can lie far above their neighbours, by what the formula cannot know."""
        ...

    @property
    def feature_groups(self) -> tuple[int, ...]:
        """How many neighbouring columns of `features` belong together, in order: their scale and
        relevance are found together."""
        ...

    def log_values(self, workloads: Sequence[Workload]) -> Array:
        """The logarithm of the metric in its unit (n)."""
        ...

    def features(self, workloads: Sequence[Workload]) -> Array:
        """What a residual model should see of each workload: shares of terms and the like (n, f).

        They do not depend on labels other than through the constants, and are finite.
        """
        ...

    def logs_and_features(self, workloads: Sequence[Workload]) -> tuple[Array, Array]:
        """`log_values` and `features`, which have most of their work in common."""
        ...

    def started_from(self, other: Self) -> Self:
        """The formula for the device of this one, with what labels taught another device's."""
        ...

    def refit(
        self,
        workloads: Sequence[Workload],
        log_values: Array,
        *,
        log_above: Array | None = None,
        tightness: float = 1.0,
        near: Self | None = None,
    ) -> Self:
        """The same formula with constants fitted to labels, starting from and drawn to these here.

        So a new device starts from another one's constants.

        Args:
            workloads: the labelled ones (n).
            log_values: logarithm of what was measured (n); NaN where only a bound is known.
            log_above: logarithm of a lower bound of the value (n), for runs that died of a limit;
                NaN elsewhere.
            tightness: factor on how far constants may move; below 1 for a well-known start.
            near: fitted to these labels and those of a fold held out, which decide what no fold
                alone needs to: the variant, how far constants may move. The search starts from
                these constants here all the same: from those of all labels it would not come away,
                and errors on the fold would look too small.
        """
        ...

    def suited(self, workloads: Sequence[Workload], log_values: Array) -> Self:
        """The variant of the formula, its constants as they are here, that explains labels best.

        Args:
            workloads: the labelled ones (n).
            log_values: logarithm of what was measured (n); NaN where it is not known.
        """
        ...

    def sensitivities(self, workloads: Sequence[Workload]) -> Array:
        """How far the logarithm moves with each constant, in units of how uncertain the constant is
        without labels: the inner products of these rows are the prior's covariance (n, c)."""
        ...

    def moved(self, by: Array) -> Self:
        """The same formula with constants moved by so many of those units (c)."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The constants, by name: all that a snapshot keeps of it."""
        ...

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of this prior."""
        ...
