"""Student-t errors, and fits with them: outliers have little influence.

A Student-t error is a normal one of unknown precision, so the most probable parameters follow from
reweighted least squares (Lange, Little and Taylor 1989).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trappm.learner.interface import Array, BoolArray

DEGREES_OF_FREEDOM = 4.0
"""Fixed, as Lange, Little and Taylor (1989) advise for few errors."""
MAX_SCALES, SCALE_TOLERANCE = 100, 1e-4
"""Largest number of fits that alternate with the scale, and the relative change that ends them."""
TO_NORMAL = 1.4826
"""Deviation of a normal distribution over its median absolute deviation: 1 / 0.6745."""


def robust_deviation(values: Array) -> float:
    """Return the deviation around zero of the middle half of values (n), as of a normal one."""
    return TO_NORMAL * float(np.median(np.abs(values)))


def precisions(squares: Array, scale: float) -> Array:
    """Return the precisions of normal errors that act like Student-t ones of these squares (n)."""
    return (DEGREES_OF_FREEDOM + 1.0) / (DEGREES_OF_FREEDOM * scale**2 + squares)


def losses(errors: Array, scale: Array | float) -> Array:
    """Return the negative log density of errors (n), up to a constant; `scale` is one or (n)."""
    degrees = DEGREES_OF_FREEDOM
    tails = 0.5 * (degrees + 1.0) * np.log1p((errors / scale) ** 2 / degrees)
    negative_logs: Array = np.log(scale) + tails
    return negative_logs


def map_fit(
    errors: Callable[[Array], Array],
    jacobian: Callable[[Array], Array],
    start: Array,
    *,
    is_value: BoolArray,
    first_scale: float,
    least_scale: float,
    weights: Array | None = None,
) -> Array:
    """Return the most probable parameters, standard normal before labels (k).

    The errors are Student-t with a common scale, which alternates with the parameters: it is the
    robust deviation of the errors, and never rises.

    Args:
        errors: Errors (n) at parameters (k); 0 for a lower bound that holds.
        jacobian: Derivatives of the errors by the parameters (n, k).
        start: Parameters to start from (k).
        is_value: Which labels are values instead of lower bounds (n); the scale is that of theirs.
        first_scale: Largest scale of the errors.
        least_scale: Smallest scale of the errors; equal to the largest, it is known.
        weights: Number of labels that each error stands for (n; default: 1).
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    degrees, identity = DEGREES_OF_FREEDOM, np.eye(len(start))
    count = len(is_value)
    counts = np.ones(count) if weights is None else weights

    def loss(squares: Array) -> Array:
        """Return -2 log density with its derivatives by the squares (3, n + k)."""
        values = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        of_errors = squares[:count]
        values[0, :count] = (degrees + 1.0) * counts * np.log1p(of_errors / degrees)
        values[1, :count] = (degrees + 1.0) * counts / (degrees + of_errors)
        values[2, :count] = -(degrees + 1.0) * counts / (degrees + of_errors) ** 2
        return values

    parameters, scale = start, first_scale
    for number in range(MAX_SCALES):
        before = scale
        scale = min(scale, robust_deviation(errors(parameters)[is_value]))
        scale = max(scale, least_scale)
        if number and scale > (1.0 - SCALE_TOLERANCE) * before:
            break
        parameters = least_squares(
            lambda x, s=scale: np.concatenate([errors(x) / s, x]),
            parameters,
            lambda x, s=scale: np.vstack([jacobian(x) / s, identity]),
            loss=loss,
        ).x
    return parameters
