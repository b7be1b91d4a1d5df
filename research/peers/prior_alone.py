"""Physics alone: our head before its residual has learned anything.

Beside it stands how much of a head's accuracy is learned, and how much is formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trappm.learner.estimator import Estimate, Model, Targets
from trappm.learner.physics.prior import Prior
from trappm.learner.workload import Workload
from trappm.profiler.errors import InputError


@dataclass(frozen=True, eq=False)
class PriorModel:
    """A prior with fitted constants."""

    prior: Prior

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        return Estimate(np.exp(self.prior.log_values(workloads)))


@dataclass(frozen=True, eq=False)
class PriorAlone:
    """Fits the constants of a prior, and nothing else; no label at all is enough."""

    prior: Prior
    name: str = "prior"

    def fit(
        self,
        workloads: Sequence[Workload],
        targets: Targets,
        generator: np.random.Generator,
        start: Model | None = None,
    ) -> PriorModel:
        """As `learner.estimator.Estimator`; from another device's constants, if there is a start.

        Raises:
            InputError: also for a start of another method.
        """
        if start is not None and not isinstance(start, PriorModel):
            raise InputError(f"{self.name} cannot start from a {type(start).__name__}")
        centre = self.prior if start is None else self.prior.started_from(start.prior)
        fitted = centre.refit(
            workloads,
            np.log(targets.values),
            log_above=np.log(targets.above),
            tightness=1.0 if start is None else centre.transfer_tightness,
        )
        return PriorModel(fitted)
