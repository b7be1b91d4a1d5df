"""The score of a distribution is its integral, and coverage is counted as intervals tell it."""

import numpy as np
import pytest

from research.evaluation.benchmark import NOMINAL, coverages
from trappm.learner.stats.calibration import LEVELS
from trappm.learner.stats.errors import accuracy, crps


def quantiles(seed, count):
    """Compare with a numerical integral for arbitrary distributions, one with equal quantiles."""
    rising = np.sort(np.random.default_rng(seed).normal(size=(count, len(LEVELS))), axis=1)
    rising[:, 41] = rising[:, 40]
    return rising


@pytest.mark.parametrize("value", [-6.0, -0.4, 0.01, 1.7, 5.0])
def test_crps_equals_the_integral_of_squared_errors(value):
    (distribution,) = quantiles(0, 1)
    grid = np.linspace(-8.0, 8.0, 200_001)
    below = np.interp(grid, distribution, LEVELS, left=0.0, right=1.0)
    integral = ((below - (grid >= value)) ** 2).sum() * (grid[1] - grid[0])
    actual = crps(distribution[None], np.array([value]))
    np.testing.assert_allclose(actual, [integral], atol=3e-4)


def test_calibrated_distribution_scores_below_a_point():
    logs = np.random.default_rng(1).normal(size=4000)
    level = np.quantile(logs, LEVELS)
    points = np.zeros((len(logs), len(LEVELS)))
    np.testing.assert_allclose(crps(points, logs), np.abs(logs))
    scores = [crps(points + width * level, logs).mean() for width in (0.0, 0.5, 1.0, 2.0)]
    assert np.argmin(scores) == 2


def test_coverage_is_that_of_each_central_interval():
    logs = np.random.default_rng(2).normal(size=20_000)
    own = np.tile(np.quantile(logs, LEVELS), (len(logs), 1))
    np.testing.assert_allclose(coverages(own, logs), NOMINAL, atol=0.005)
    wide, narrow = coverages(2 * own, logs), coverages(own / 2, logs)
    assert np.all(wide > NOMINAL)
    assert np.all(narrow < NOMINAL)


def test_accuracy_has_the_score_of_the_logarithm_in_percent():
    measured, predicted = np.array([100.0, np.nan]), np.array([110.0, 5.0])
    point = np.tile(np.log(predicted)[:, None], len(LEVELS))
    actual = accuracy(measured, predicted, log_quantiles=point)
    assert actual["crps"] == pytest.approx(100 * np.log(1.1))
    assert accuracy(measured, predicted)["crps"] is None
