"""Fit of one device's step-time constants to its labels.

Errors of the logarithm are Student-t, the constants' prior is Gaussian. `research/priors` fits many
devices together, from steps and single kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trappm.learner.physics.device_specs import DeviceSpec
from trappm.learner.physics.kernel_terms import Terms
from trappm.learner.physics.kernel_times import group_rows, linear, log_times
from trappm.learner.workload import Array

# Round numbers, unless a source is named.
NOISE_DEGREES = 3.0
"""Degrees of freedom of the Student-t error."""
LEAST_NOISE = 0.02
"""Least noise of the logarithm, below the error of docs/research/step_time.md alone."""
FEW = 10.0
"""Number of labels that a fit can meet by chance, which raises the least noise."""
ITERATIONS = 40
CALM_STEPS, LEAST_GAIN = 2, 5e-3
"""Steps in a row that end a fit, and the gain that they stay below: nats times the root of the
number of labels."""
MOST_DAMPING = 1e8
"""Damping at which a fit ends without another step."""
ROUNDS = 3
"""Fits, each with spreads learned from the one before."""
PSEUDO_CONSTANTS = 6.0
"""Weight of the first spread, as a number of learned constants."""
CHANGES = (0.1, 3.0)
"""Bounds of a learned spread relative to the first."""


def spread_factor(moved: float, determined: float, smallest: float, largest: float) -> float:
    """Return the factor on a group's first spread by evidence maximization.

    A group's variance is the sum of its squared shifts over its degrees of freedom, the number of
    constants that labels determined (MacKay 1992, "Bayesian interpolation").

    Args:
        moved: Sum of the squared shifts, in first spreads.
        determined: Degrees of freedom.
        smallest, largest: Bounds of the factor.
    """
    variance = (PSEUDO_CONSTANTS + moved) / (PSEUDO_CONSTANTS + determined)
    return float(min(max(variance**0.5, smallest), largest))


def student_loss(errors: Tensor, scale: Tensor | float) -> float:
    """Return twice the negative log density of Student-t errors, up to a constant."""
    tails = torch.log1p(errors**2 / (NOISE_DEGREES * scale**2))
    return float((NOISE_DEGREES + 1) * tails.sum())


def noise_scale(errors: Tensor, before: float) -> float:
    """Return the noise scale of some labels: their median error, never rising."""
    smallest = LEAST_NOISE * (1 + FEW / len(errors))
    return max(smallest, min(before, 1.48 * float(errors.abs().median())))


def normal_variances(errors: Tensor, scales: Tensor | float) -> Tensor:
    """Return variances of normal errors that act like Student-t ones (n)."""
    return (NOISE_DEGREES * scales**2 + errors**2) / (NOISE_DEGREES + 1)


class DeviceFit:
    """The most probable constants of one device.

    Attributes:
        spreads: Spread of each constant, learned or as given (c).
    """

    def __init__(
        self,
        chunks: Sequence[Terms],
        log_values: Array,
        spec: DeviceSpec,
        *,
        centre: Tensor,
        spreads: Tensor,
        learns: bool,
    ) -> None:
        """Fit the constants.

        Args:
            chunks: Terms of the labelled steps, a few at a time.
            log_values: Logarithms of their times in ms (n).
            spec: Specification of the device.
            centre: Center of the constants' prior (c).
            spreads: Deviations of the constants' prior (c), all positive.
            learns: Whether to learn the spread of each group of constants, too.
        """
        self.spreads = spreads
        self._chunks, self._spec, self._centre = chunks, spec, centre
        self._labels = torch.from_numpy(np.asarray(log_values, dtype=np.float64))
        self._shift = torch.zeros_like(spreads)  # in units of the spreads
        self._noise = 0.5
        for _ in range(ROUNDS - 1 if learns else 0):
            self._fit()
            self._learn_spreads(spreads)
        self._fit()

    @property
    def constants(self) -> Tensor:
        """The constants (c)."""
        return self._centre + self.spreads * self._shift

    def _linear(self) -> tuple[Tensor, Tensor]:
        """Return errors (n) and derivatives of the predictions by the shifts (n, c)."""
        values, jacobian = linear(self._chunks, self.constants, self._spec)
        return self._labels - values, jacobian * self.spreads

    def _loss(self, errors: Tensor) -> float:
        """Return twice the negative log posterior at this noise, up to a constant."""
        return student_loss(errors, self._noise) + float((self._shift**2).sum())

    def _fit(self) -> None:
        """Take damped Gauss-Newton steps on reweighted squares.

        `scipy.optimize.least_squares`, and so `map_fit`, decomposes labels + constants times
        constants at each step. For 120 kernels of one device it had not ended after 20 s of CPU
        time; this takes 0.2 s.
        """
        errors, slopes = self._linear()
        damping, calm = 0.1, 0
        for _ in range(ITERATIONS):
            self._noise = noise_scale(errors, self._noise)
            variances = normal_variances(errors, self._noise)
            loss, before = self._loss(errors), self._shift
            gain = -1.0
            while not gain >= 0 and damping < MOST_DAMPING:  # also where it is not a number
                self._shift = self._moved(errors, slopes, variances, 1 + damping, before)
                values = log_times(self._chunks, self.constants, self._spec)
                gain = loss - self._loss(self._labels - values)
                damping = damping * 4 if not gain >= 0 else max(damping / 4, 1e-4)
            if not gain >= 0:
                self._shift = before
                return
            calm = calm + 1 if gain < LEAST_GAIN * len(self._labels) ** 0.5 else 0
            if calm == CALM_STEPS:
                return
            errors, slopes = self._linear()

    def _moved(
        self, errors: Tensor, slopes: Tensor, variances: Tensor, weight: float, shift: Tensor
    ) -> Tensor:
        """Return the shift after a step from `shift`, with this weight on zero.

        The system has the size of the labels (Woodbury's identity), or of the constants if those
        are fewer.
        """
        if len(errors) > len(shift):
            precision = slopes.T @ (slopes / variances[:, None])
            precision.diagonal().add_(weight)
            slope = slopes.T @ (errors / variances) - shift
            step: Tensor = torch.linalg.solve(precision, slope)
            return shift + step
        covariance = torch.diag(weight * variances) + slopes @ slopes.T
        solved: Tensor = torch.linalg.solve(covariance, errors + slopes @ shift / weight)
        return shift + slopes.T @ solved - shift / weight

    def _unsure(self) -> Tensor:
        """Return the posterior variance of the shifts (c)."""
        errors, slopes = self._linear()
        self._noise = noise_scale(errors, self._noise)
        variances = normal_variances(errors, self._noise)
        if len(errors) > len(self._shift):
            precision = slopes.T @ (slopes / variances[:, None])
            precision.diagonal().add_(1.0)
            unsure: Tensor = torch.linalg.inv(precision).diagonal()
            return unsure
        inverse: Tensor = torch.linalg.inv(torch.diag(variances) + slopes @ slopes.T)
        return 1.0 - (slopes * (inverse @ slopes)).sum(0)

    def _learn_spreads(self, first: Tensor) -> None:
        """Learn the spread of each group of constants from the first ones (`spread_factor`).

        One device says nothing about the spread of a group of one common constant.
        """
        unsure, learned = self._unsure(), first.clone()
        for group, rows in group_rows():
            if not group.common:
                scale = self.spreads[rows] / first[rows]
                moved = float(((self._shift[rows] * scale) ** 2).sum())
                determined = float((1.0 - unsure[rows]).sum())
                learned[rows] *= spread_factor(moved, determined, *CHANGES)
        self._shift, self.spreads = self._shift * self.spreads / learned, learned
