"""Intervals hold on new architectures, widen with the stated deviation, and know their limits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trappm.learner.stats.calibration import (
    LEVELS,
    Calibration,
    Familiarity,
    UnseenErrors,
)


def errors(architectures, seed, labels=4):
    """Heavy-tailed errors with a part common to an architecture, and deviations half the truth."""
    generator = np.random.default_rng(seed)
    scale = np.exp(generator.normal(size=architectures * labels))
    common = np.repeat(generator.standard_t(4, architectures), labels)
    own = generator.standard_t(4, architectures * labels)
    groups = np.repeat(np.arange(architectures), labels).astype(str)
    return scale * (common + own + 0.3), 0.5 * scale, list(groups)


@pytest.mark.parametrize(
    ("architectures", "kind"), [(15, "normal"), (35, "laplace"), (80, "student")]
)
def test_intervals_from_few_errors_have_the_stated_coverage(architectures, kind):
    held = []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        draws = {
            "normal": generator.normal,
            "laplace": generator.laplace,
            "student": lambda size, g=generator: g.standard_t(4, size),
        }
        seen, new = draws[kind](size=architectures), draws[kind](size=1000)
        scale = np.median(np.abs(seen)) / 0.6745  # as a head states it
        groups = [str(i) for i in range(architectures)]
        low, high = Calibration.fit(seen, np.full(architectures, scale), groups).interval()
        held.append(np.mean((low * scale <= new) & (new <= high * scale)))
    assert 0.89 < np.mean(held) < 0.925


def test_censored_errors_do_not_narrow_the_interval():
    whole, cut = [], []
    for seed in range(8):
        actual, deviation, groups = errors(400, seed, labels=1)
        limit = deviation * np.random.default_rng(seed).uniform(-4, 8, len(actual))
        known = actual < limit
        least = np.minimum(actual, limit)
        whole.append(Calibration.fit(actual, deviation, groups).interval())
        cut.append(Calibration.fit(least, deviation, groups, known).interval())
    np.testing.assert_allclose(np.mean(cut, axis=0), np.mean(whole, axis=0), rtol=0.1)


def test_repeated_labels_of_an_architecture_count_once():
    actual, deviation, groups = errors(200, 0, labels=1)
    single = Calibration.fit(actual, deviation, groups)
    copies = [groups[0]] * 500
    many = Calibration.fit(
        np.append(actual, np.full(500, actual[0])),
        np.append(deviation, np.full(500, deviation[0])),
        groups + copies,
    )  # fmt: skip
    np.testing.assert_allclose(single.interval(), many.interval(), rtol=0.05)


def test_calibrations_are_restored_from_tensors_and_damage_is_refused():
    calibration = Calibration.fit(*errors(50, 0))
    again = Calibration.from_tensors(calibration.tensors())
    np.testing.assert_array_equal(again.quantiles, calibration.quantiles)
    with pytest.raises(ValueError, match="must rise"):
        Calibration.from_tensors({"quantiles": calibration.tensors()["quantiles"].flip(0)})
    with pytest.raises(ValueError, match="must rise"):
        Calibration.from_tensors({"quantiles": torch.zeros(len(LEVELS) + 1)})


@pytest.mark.parametrize("architectures", [0, 1, 10])
def test_few_errors_give_wide_intervals(architectures):
    low, high = Calibration.fit(*errors(architectures, 1)).interval()
    assert low < -1 < 1 < high


def test_exceedance_probabilities_match_frequencies():
    calibration = Calibration.fit(*errors(800, 0))
    actual, deviation, _ = errors(4000, 5, labels=1)
    for ratio in (-3.0, 0.0, 2.0, 6.0):
        happened = np.mean(actual / deviation > ratio)
        assert calibration.exceeding(np.array([ratio]))[0] == pytest.approx(happened, abs=0.03)


def known(seed=0):
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(60, 5))
    features = np.repeat(centres, 4, axis=0) + 0.01 * generator.normal(size=(240, 5))
    return features, list(np.repeat(np.arange(60), 4).astype(str))


def test_only_unfamiliar_architectures_are_outside():
    familiarity = Familiarity.fit(*known())
    new = np.random.default_rng(9).normal(size=(300, 5))
    assert familiarity.outside(familiarity.distance(new)).mean() < 0.1
    assert familiarity.outside(familiarity.distance(new + 12.0)).all()


def unseen_errors(features, growth, seed=1):
    """Of folds of architectures and of a half of the features' space, growing with the distance."""
    generator = np.random.default_rng(seed)
    near = np.repeat(np.arange(60) % 5, 4)
    far = (features[:, 0] > np.median(features[:, 0])).astype(np.int64)
    typical = np.median(nearest_in_other_folds(features, near))
    parts = []
    for folds in (near, far):
        distance = nearest_in_other_folds(features, folds) / typical
        errors = generator.normal(0, 0.05, 240) * np.hypot(1.0, growth * distance)
        parts.append(UnseenErrors(errors, np.full(240, 0.05), folds))
    return parts, typical


@pytest.mark.parametrize(("growth", "least", "most"), [(0.0, 0.1, 0.35), (3.0, 0.69, 3.0)])
def test_deviations_widen_with_distance_as_errors_do(growth, least, most):
    features, groups = known()
    some, all_known = Familiarity.fit(features, groups), np.ones(240, dtype=bool)
    parts, typical = unseen_errors(features, growth)
    wider, deviations = some.fit_widening(parts, 0.05, groups, all_known)
    assert least <= wider.widening * typical / 0.05 <= most + 0.01
    distance = nearest_in_other_folds(features, parts[0].folds)
    np.testing.assert_allclose(deviations, np.hypot(0.05, wider.widening * distance), rtol=0.01)
    new = np.random.default_rng(9).normal(size=(50, 5))
    near_and_far = [wider.widened(np.full(50, 0.05), wider.distance(x)) for x in (new, new + 9.0)]
    assert near_and_far[1].min() > near_and_far[0].max() > 0.05


def nearest_in_other_folds(features, folds):
    scaled = features / features.std(axis=0)
    apart = np.linalg.norm(scaled[:, None] - scaled[None], axis=-1)
    return np.where(folds[:, None] == folds, np.inf, apart).min(axis=1)


def test_familiarity_is_restored_from_tensors_and_damage_is_refused():
    familiarity = replace(Familiarity.fit(*known()), widening=0.012)
    again = Familiarity.from_tensors(familiarity.tensors())
    assert again.widening == familiarity.widening
    with pytest.raises(ValueError, match="one scale for each column"):
        Familiarity.from_tensors({**familiarity.tensors(), "scale": torch.ones(2)})
    with pytest.raises(ValueError, match="widens"):
        Familiarity.from_tensors({**familiarity.tensors(), "widening": torch.tensor(np.inf)})
