"""Step times of transformers on cards of which steps of language models were published.

Constants of a card, moved by what those steps say (`learner.physics.transformer_times`); intervals
are the errors on language models held out, wider by what launches cost on hosts that nobody knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trappm.learner.estimator import Estimate
from trappm.learner.heads.device_heads import Heads
from trappm.learner.heads.metric_head import Head
from trappm.learner.heads.other_devices import GAUSSIAN, OtherDevices, head_of
from trappm.learner.heads.predictions import TrainedHeads
from trappm.learner.physics.device_specs import DeviceSpec, known_spec
from trappm.learner.physics.prior import Prior
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.physics.transformer_times import (
    HOST_RANGE,
    TransformerTimes,
    transformer_times,
)
from trappm.learner.stats.calibration import LEVELS, Calibration
from trappm.learner.workload import Workload
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.records import Precision

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LanguageModelHead(Head[Prior]):
    """A head without residual, whose interval knows how much of a step its host decides."""

    slow_host: Prior | None = None
    """The same card, on a host that is slower by `HOST_RANGE`."""
    fast_host: Prior | None = None

    def predict(self, workloads: Sequence[Workload]) -> Estimate:
        made = super().predict(workloads)
        assert made.low is not None  # noqa: S101  (heads state intervals)
        assert made.high is not None  # noqa: S101
        low = self._widened(made.median, made.low, self.fast_host, workloads)
        high = self._widened(made.median, made.high, self.slow_host, workloads)
        return replace(made, low=low, high=high, log_std=np.log(high / low) / (2 * GAUSSIAN))

    @staticmethod
    def _widened(
        median: Array, bound: Array, other: Prior | None, workloads: Sequence[Workload]
    ) -> Array:
        """A bound with what another host makes of it; both are taken as independent."""
        if other is None:
            return bound
        own, hosts = np.log(bound / median), other.log_values(workloads) - np.log(median)
        both: Array = median * np.exp(np.sign(own + hosts) * np.hypot(own, hosts))
        return both


def for_transformers(
    trained: TrainedHeads, others: OtherDevices, card: str, precision: Precision
) -> tuple[TrainedHeads, str | None]:
    """The heads of a card with step times by steps of language models, and what these are.

    The heads as they are, and None, where none were published for such a card and precision.

    Args:
        trained: of the card, as for any model.
        others: what is known of cards.
        card: as the catalogue has it.
        precision: of the step.
    """
    times, spec = transformer_times(card, precision), known_spec(card)
    if times is None or spec is None or not isinstance(trained.heads, Heads):
        return trained, None
    head = language_model_head(others, card, spec, times, errors_of(times))
    known = trained.heads
    heads = replace(known, heads={**known.heads, "step_time_ms": head})
    return replace(trained, heads=heads), times.basis


def language_model_head(
    others: OtherDevices, card: str, spec: DeviceSpec, times: TransformerTimes, errors: Calibration
) -> LanguageModelHead:
    """The head of step times of transformers on a card.

    Args:
        others: what is known of cards.
        card: as the catalogue has it.
        spec: of the card.
        times: what steps of language models say of it.
        errors: quantiles of log(measured / predicted), on hosts like ours.
    """
    constants = constants_of(times, others, card)
    priors = [
        StepTimePrior(spec, times.moved(constants, spec, slower))
        for slower in (1.0, HOST_RANGE, 1 / HOST_RANGE)
    ]
    plain = head_of(priors[0], errors)
    return LanguageModelHead(**vars(plain), slow_host=priors[1], fast_host=priors[2])


def constants_of(times: TransformerTimes, others: OtherDevices, card: str) -> Tensor:
    """What other labels say of a card, or of the one that it is like (c)."""
    model = times.like or read_name(card).model
    basis = others.basis(model)
    return others.of_cards.get((basis, model), others.constants) if basis else others.constants


def errors_of(times: TransformerTimes) -> Calibration:
    """Quantiles of log(measured / predicted) that end where 90 % of those of models held out do."""
    deviations = np.log(times.errors) / GAUSSIAN
    normal = np.array([NormalDist().inv_cdf(level) for level in LEVELS.tolist()])
    return Calibration(np.abs(normal) * np.where(normal < 0, deviations[0], deviations[1]))
