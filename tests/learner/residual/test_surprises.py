"""Surprises: the second part of a memory interval."""

import numpy as np
import pytest

from trappm.learner.residual.surprises import LEAST_SURPRISES, Surprises
from trappm.learner.stats.calibration import LEVELS, Calibration, central_interval


@pytest.fixture(scope="module")
def labels():
    """A fifth of 600 labels surprises, nearly all of them where the first feature is high."""
    generator = np.random.default_rng(0)
    features = generator.uniform(size=(600, 3))
    surprising = (features[:, 0] > 0.75) & (generator.uniform(size=600) < 0.8)
    errors = 0.02 * generator.standard_normal(600) + np.where(surprising, 0.4, 0.0)
    return features, errors, surprising


def fitted(features, errors):
    count = len(errors)
    groups = [f"net{i // 3}" for i in range(count)]
    deviations, known = np.full(count, 0.02), np.ones(count, dtype=bool)
    folds = np.arange(count) // 3 % 5
    everything = Calibration.fit(errors, deviations, groups, known)
    return everything, Surprises.fit(
        features, errors, deviations, groups, folds, known, 1.0, np.random.default_rng(1)
    )


def test_intervals_include_outliers_only_where_likely(labels):
    features, errors, _ = labels
    everything, surprises = fitted(features, errors)
    at = np.array([[0.95, 0.5, 0.5], [0.2, 0.5, 0.5]])
    chance, weight = surprises.probability(at, np.zeros(2))
    assert chance[0] > 0.5
    assert chance[1] < 0.05
    middle, deviations = np.zeros(2), np.full(2, 0.02)
    quantiles = surprises.log_quantiles(everything, middle, deviations, chance, weight)
    low, high = central_interval(quantiles)
    assert low[0] < 0.02
    assert high[0] > 0.38
    assert high[1] < 0.1
    assert np.all(np.diff(quantiles, axis=1) >= 0)


def test_exceedance_agrees_with_the_quantiles(labels):
    features, errors, _ = labels
    everything, surprises = fitted(features, errors)
    given = np.zeros(1), np.full(1, 0.02), np.full(1, 0.3), np.full(1, 0.7)
    quantiles = surprises.log_quantiles(everything, *given)[0]
    for gap in (-0.02, 0.01, 0.2, 0.4):
        _, *rest = given
        exceeding = surprises.exceeding(everything, np.full(1, gap), *rest)[0]
        assert exceeding == pytest.approx(1 - np.interp(gap, quantiles, LEVELS), abs=0.01)


def test_far_from_labels_outliers_are_unknown(labels):
    features, errors, _ = labels
    everything, surprises = fitted(features, errors)
    chance, weight = surprises.probability(np.array([[0.95, 0.5, 0.5]]), np.array([50.0]))
    quantiles = surprises.log_quantiles(everything, np.zeros(1), np.full(1, 0.02), chance, weight)
    np.testing.assert_allclose(quantiles, 0.02 * everything.quantiles[None], atol=1e-9)


def test_too_few_outliers_are_ignored(labels):
    features, errors, surprising = labels
    few = np.flatnonzero(surprising)[: LEAST_SURPRISES - 1]
    rows = np.sort(np.concatenate([np.flatnonzero(~surprising), few]))
    assert fitted(features[rows], errors[rows])[1] is None


def test_outliers_are_restored_from_tensors_and_damage_is_refused(labels):
    features, errors, _ = labels
    surprises = fitted(features, errors)[1]
    tensors = surprises.tensors()
    again = Surprises.from_tensors(tensors)
    for probability, other in zip(
        surprises.probability(features, np.ones(600)),
        again.probability(features, np.ones(600)),
        strict=True,
    ):
        np.testing.assert_array_equal(probability, other)
    with pytest.raises(ValueError, match="do not rise"):
        Surprises.from_tensors({**tensors, "scores": tensors["scores"].flip(0)})
    with pytest.raises(ValueError, match="reach"):
        Surprises.from_tensors({**tensors, "reach": -tensors["reach"]})
