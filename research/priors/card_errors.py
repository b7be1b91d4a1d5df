"""Quantiles of the errors on cards held out, which give cards without labels their intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trappm.learner.stats.calibration import LEVELS, Calibration
from trappm.learner.stats.student_t import TO_NORMAL

Array = npt.NDArray[np.float64]


def errors_of_devices(errors: Array, devices: Sequence[str]) -> Calibration:
    """Return quantiles of log(measured / predicted) on held-out cards (n), one vote per card."""
    _, number, count = np.unique(np.array(devices), return_inverse=True, return_counts=True)
    order = np.argsort(np.abs(errors))
    votes = np.cumsum((1.0 / count[number])[order])
    middle = float(np.abs(errors)[order][np.searchsorted(votes, votes[-1] / 2)])
    deviation = max(TO_NORMAL * middle, 1e-3)
    fitted = Calibration.fit(errors, np.full(len(errors), deviation), devices)
    return Calibration(fitted.quantiles * deviation)


def pooled_errors(
    errors: Array, devices: Sequence[str], architectures: Sequence[str]
) -> Calibration:
    """Return quantiles of log(measured / predicted) on cards held out, of all cards together.

    Every card has the same weight, shared by its architectures. Unlike in `errors_of_devices`, no
    errors are added for cards that nobody measured: a simulated step allocates the same on each, so
    models differ by more than cards do. With two cards the quantiles are indicative.

    Args:
        errors: of each label (n).
        devices: the card of each label (n).
        architectures: of each label (n).
    """
    weights = np.ones(len(errors))
    models = [f"{card} {name}" for card, name in zip(devices, architectures, strict=True)]
    for groups in (models, devices):
        _, number = np.unique(np.array(groups), return_inverse=True)
        weights /= np.bincount(number, weights)[number]
    order = np.argsort(errors)
    weights = weights[order] / weights.sum()
    levels = np.cumsum(weights) - weights / 2
    return Calibration(np.interp(LEVELS, levels, errors[order]))
