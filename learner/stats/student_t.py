"""Student-t errors as weighted squares, so that outliers have little influence.

A Student-t error is a normal one of unknown precision, so the most probable parameters follow from
reweighted least squares (Lange, Little and Taylor 1989).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float64]
ArrayOrTensor = TypeVar("ArrayOrTensor", Array, "Tensor")

DEGREES_OF_FREEDOM = 4.0
"""Fixed, as Lange, Little and Taylor (1989) advise for few errors."""
TO_NORMAL = 1.4826
"""Deviation of a normal distribution over its median absolute deviation: 1 / 0.6745."""


def robust_deviation(values: Array) -> float:
    """Return the deviation around zero of the middle half of values (n), as of a normal one."""
    return TO_NORMAL * float(np.median(np.abs(values)))


def precisions(
    squares: ArrayOrTensor, scale: float, degrees: float = DEGREES_OF_FREEDOM
) -> ArrayOrTensor:
    """Return the precisions of normal errors that act like Student-t ones of these squares (n)."""
    return (degrees + 1.0) / (degrees * scale**2 + squares)


def losses(errors: Array, scale: Array | float) -> Array:
    """Return the negative log density of errors (n), up to a constant; `scale` is one or (n)."""
    degrees = DEGREES_OF_FREEDOM
    tails = 0.5 * (degrees + 1.0) * np.log1p((errors / scale) ** 2 / degrees)
    negative_logs: Array = np.log(scale) + tails
    return negative_logs
