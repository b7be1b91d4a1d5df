"""Between which values the labels of a head lie, to be less sure far beyond them.

A formula holds a little beyond the labels that its constants were fitted to, and less far beyond.
On CPU cores, intervals of step times held 80 % of the time up to three times the largest label and
31 % from ten to fifteen times; widened as here, 70 % (`research/priors/cpu_cores.py --beyond`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.learner.estimator import Targets

Array = npt.NDArray[np.float64]

FAR = 3.0
"""A value that is so many times the largest label, or so small a part of the least, lies far beyond
the labels; one that is so many times farther is twice as unsure."""


@dataclass(frozen=True)
class LabelledRange:
    """The least and the largest value of labels, in the metric's unit."""

    low: float
    high: float

    @classmethod
    def of(cls, targets: Targets) -> Self | None:
        """What runs that died have shown to be needed counts, too; None without labels."""
        known = np.fmax(targets.values, targets.above)
        return cls(float(known.min()), float(known.max())) if len(known) else None

    def widened(self, deviations: Array, log_values: Array) -> Array:
        """Deviations that know how far n predicted values are from the labels (n)."""
        below, above = np.log(self.low) - log_values, log_values - np.log(self.high)
        widened: Array = deviations * np.maximum(np.maximum(below, above) / np.log(FAR), 1.0)
        return widened

    def end_before(self, values: Array) -> Array:
        """The end of the labels that n predicted values lie far beyond (n); NaN where none."""
        ends: Array = np.select(
            [values > FAR * self.high, values < self.low / FAR], [self.high, self.low], np.nan
        )
        return ends

    def tensors(self) -> dict[str, Tensor]:
        return {"ends": torch.tensor([self.low, self.high], dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Raises KeyError or ValueError for tensors that are not those of a range."""
        low, high = tensors["ends"].tolist()
        if not 0.0 < low <= high < np.inf:
            raise ValueError(f"labels between {low} and {high}")
        return cls(low, high)
