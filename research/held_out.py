"""Held-out rows and errors shared by all studies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Chosen = npt.NDArray[np.bool_]


def held_out(groups: Sequence[str] | npt.NDArray[np.str_], seed: int, share: float = 0.2) -> Chosen:
    """Hold out whole groups until they have the share of all rows.

    Args:
        groups: Group of each row, shape (n,).
        seed: Seed of the draw.
        share: Minimum share of held-out rows.

    Returns:
        Mask of held-out rows, shape (n,).
    """
    names = np.asarray(groups)
    chosen = np.zeros(len(names), dtype=np.bool_)
    for name in np.random.default_rng(seed).permutation(np.unique(names)):
        if chosen.mean() >= share:
            break
        chosen |= names == name
    return chosen


def percent_errors(log_ratios: npt.ArrayLike) -> Array:
    """Return |predicted / measured - 1| in percent from log(measured / predicted)."""
    errors: Array = 100 * np.abs(np.expm1(-np.asarray(log_ratios, dtype=np.float64)))
    return errors


def robust_line(estimates: Array, measured: Array, floor: float) -> Array:
    """Fit offset and factor by least absolute relative error.

    Args:
        estimates: Predictors, shape (n,).
        measured: Targets, shape (n,).
        floor: Lower limit of the relative errors in the weights.

    Returns:
        Offset and factor, shape (2,), by iteratively reweighted least squares.
    """
    terms = np.column_stack([np.ones(len(estimates)), estimates])
    weights = 1 / measured
    for _ in range(50):
        fitted = np.linalg.lstsq(terms * weights[:, None], measured * weights, rcond=None)[0]
        line: Array = fitted.astype(np.float64)
        errors = np.abs(terms @ line / measured - 1)
        weights = 1 / (measured * np.sqrt(np.maximum(errors, floor)))
    return line
