"""The score of a distribution is its integral, and coverage is counted as intervals tell it."""

import numpy as np
import pytest

from research.evaluation.benchmark import NOMINAL, coverages
from trappm.learner.stats.calibration import LEVELS
from trappm.learner.stats.errors import crps


def quantiles(seed, count):
    """Compare with a numerical integral for arbitrary distributions, one with equal quantiles."""
    rising = np.sort(np.random.default_rng(seed).normal(size=(count, len(LEVELS))), axis=1)
    rising[:, 41] = rising[:, 40]
    return rising


@pytest.mark.parametrize("value", [-6.0, 0.01, 1.7])
def test_crps_equals_the_integral_of_squared_errors(value):
    (distribution,) = quantiles(0, 1)
    grid = np.linspace(-8.0, 8.0, 200_001)
    below = np.interp(grid, distribution, LEVELS, left=0.0, right=1.0)
    integral = ((below - (grid >= value)) ** 2).sum() * (grid[1] - grid[0])
    actual = crps(distribution[None], np.array([value]))
    np.testing.assert_allclose(actual, [integral], atol=3e-4)


def test_coverage_is_that_of_each_central_interval():
    logs = np.random.default_rng(2).normal(size=20_000)
    own = np.tile(np.quantile(logs, LEVELS), (len(logs), 1))
    np.testing.assert_allclose(coverages(own, logs), NOMINAL, atol=0.005)
    wide, narrow = coverages(2 * own, logs), coverages(own / 2, logs)
    assert np.all(wide > NOMINAL)
    assert np.all(narrow < NOMINAL)
