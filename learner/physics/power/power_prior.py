"""Prior of power from kernels: idle power, and energies of kernels over step time.

The sum of `operating_point` at the full clock, which begins with what cards of known power share.
Step times are those of the device's own prior, so a step that waits for its host draws less. The
limit is not in it: heads are of one limit, and what it takes is left to residuals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.physics.power.known_power import other_cards_shares
from trappm.learner.physics.power.loads import loads_of
from trappm.learner.physics.power.operating_point import CONSTANTS
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.physics.term_prior import PriorSpec, TermPrior, TermSpec
from trappm.learner.tensors import with_prefix
from trappm.learner.workload import Workload

Array = npt.NDArray[np.float64]

USUAL_W = 300.0
"""Share of a card's limit; a round number, since few labels determine the level."""
_SPREADS = {"idle": 0.3, "busy": 0.5, "full": 0.5, "half": 0.5, "tf32": 0.5, "bytes": 0.5}
"""Spread between cards (`research/priors/power_fit.py`), of the first of `CONSTANTS`."""
_SPEC = PriorSpec(tuple(TermSpec(*item) for item in _SPREADS.items()), common_spread=0.7)


class PowerPrior(TermPrior):
    """See `learner.physics.prior.Prior`."""

    def __init__(
        self, times: StepTimePrior, full_w: Array, log_constants: Array | None = None
    ) -> None:
        """
        Args:
            times: of the device.
            full_w: before labels, what each term draws at its peak, in the order of `_SPREADS`.
            log_constants: as labels have moved them.
        """
        super().__init__(_SPEC, log_constants)
        self.times = times
        self.full_w = full_w

    @classmethod
    def with_times(cls, times: StepTimePrior) -> Self:
        """As labels of other cards have it; how much in all, labels say."""
        return cls(times, USUAL_W * other_cards_shares()[: len(_SPREADS)])

    @property
    def feature_groups(self) -> tuple[int, ...]:
        return (1, len(_SPREADS), *self.times.feature_groups)

    def with_constants(self, log_constants: Array) -> Self:
        return type(self)(self.times, self.full_w, log_constants)

    def terms(self, workloads: Sequence[Workload]) -> Array:
        if not len(workloads):
            return np.zeros((0, len(_SPREADS)))
        loads, spec = loads_of(workloads, self.times), self.times.spec
        time_s = np.exp(self.times.log_values(workloads)) / 1e3
        peaks = [spec.full_tflops, spec.half_tflops, spec.tf32_tflops or spec.full_tflops]
        shares = [
            np.ones(len(loads)),
            np.maximum(loads.device_ms - loads.launch_ms, 0.0) / 1e3 / time_s,
            *(loads.operations / (np.array(peaks) * 1e12) / time_s[:, None]).T,
            loads.bytes / (spec.bandwidth_gbs * 1e9) / time_s,
        ]
        terms: Array = np.stack(shares, axis=1) * self.full_w
        return terms

    def features_of(self, workloads: Sequence[Workload], logs: Array, shares: Array) -> Array:
        """Return the power and the shares of terms and kernels (n, f)."""
        return np.hstack([logs[:, None], shares, self.times.features(workloads)])

    def tensors(self) -> dict[str, Tensor]:
        times = {f"times.{name}": tensor for name, tensor in self.times.tensors().items()}
        return {**super().tensors(), **times, "full_w": torch.from_numpy(self.full_w.copy())}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        times = StepTimePrior.from_tensors(with_prefix(tensors, "times."))
        full_w = tensors["full_w"].numpy()
        if full_w.shape != (len(_SPREADS),) or not np.all(np.isfinite(full_w) & (full_w > 0)):
            raise ValueError(f"power in W that is not positive: {full_w}")
        return cls(times, full_w, tensors["log_constants"].numpy())


if CONSTANTS[: len(_SPREADS)] != tuple(_SPREADS):
    raise ValueError("the terms of power are the first constants of a card")
