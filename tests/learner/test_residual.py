"""The residual learns what there is to learn, and stays silent where there is nothing."""

from functools import cache

import numpy as np
import pytest

from trappm.learner.gaussian_process import fit_process
from trappm.learner.residual import fit_residual
from trappm.learner.stats.folds import cluster_folds, draw_rows, grouped_folds


def data(rows, seed=0, noise=0.02, outliers=0.0):
    """Architectures of four labels each; what is to be explained hangs on two of six features."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(rows, 6))
    truth = 0.2 * np.sin(features[:, 0]) + 0.1 * features[:, 1]
    values = truth + noise * generator.standard_t(4, rows)
    surprised = generator.random(rows) < outliers
    return features, truth, values + 2.0 * surprised, [f"a{i // 4}" for i in range(rows)]


@cache
def fitted(rows, seed=0, **how):
    features, _, values, groups = data(rows, seed, **how)
    return fit_residual(
        features, values, groups, np.random.default_rng(seed), feature_groups=(2, 4)
    )


@pytest.mark.parametrize("rows", [20, 200])
def test_error_falls_with_the_number_of_labels(rows):
    residual, _ = fitted(rows)
    features, truth, _, _ = data(400, seed=9)
    error = np.abs(residual.predict(features)[0] - truth).mean()
    assert error < {20: 0.9, 200: 0.25}[rows] * np.abs(truth).mean()


def test_outliers_do_not_spoil_the_residual():
    features, truth, _, _ = data(400, seed=9)
    clean, spoilt = (fitted(200, outliers=share)[0] for share in (0.0, 0.05))
    errors = [np.abs(r.predict(features)[0] - truth).mean() for r in (clean, spoilt)]
    assert errors[1] < 1.6 * errors[0]


def test_labels_count_by_their_own_errors():
    """Three of five labels have an error that is known."""
    rows = 120
    features, _, values, groups = data(rows)
    generator = np.random.default_rng(1)
    own = np.where(generator.random(rows) < 0.6, 0.25, 0.0)
    values = values + own * generator.normal(size=rows)
    (equal, _), (weighted, unseen) = (
        fit_residual(
            features, values, groups, np.random.default_rng(0), feature_groups=(2, 4),
            label_errors=errors,
        )
        for errors in (None, own)
    )  # fmt: skip
    unseen_features, unseen_truth, _, _ = data(400, seed=9)
    off = [np.abs(r.predict(unseen_features)[0] - unseen_truth).mean() for r in (equal, weighted)]
    assert off[1] < 0.9 * off[0]
    assert weighted.noise < 0.8 * equal.noise
    # What a label may be off is the model's deviation and its own error.
    assert unseen.deviation[own > 0].min() > 0.25 > np.median(unseen.deviation[own == 0])


def test_out_of_fold_predictions_do_not_know_their_labels():
    features, _, values, groups = data(40)
    folds = grouped_folds(groups, 5, np.random.default_rng(0))
    _, unseen = fit_process(features, values, (6,), folds, np.random.default_rng(1))
    assert np.corrcoef(unseen.mean, values)[0, 1] > 0.3
    pure_noise = np.random.default_rng(3).normal(size=40)
    _, unseen = fit_process(features, pure_noise, (6,), folds, np.random.default_rng(1))
    assert abs(np.corrcoef(unseen.mean, pure_noise)[0, 1]) < 0.45


def test_bounds_are_learned_from():
    count = 64
    features, _, values, groups = data(count)
    cut = values > 0.1
    known = np.where(cut, np.nan, values)
    points, answer, _, _ = data(400, seed=9)
    high = answer > 0.15
    folds = grouped_folds(groups, 5, np.random.default_rng(0))

    def error(rows, bounds):
        residual, _ = fit_residual(
            features[rows],
            known[rows],
            [g for g, taken in zip(groups, rows, strict=True) if taken],
            np.random.default_rng(0),
            feature_groups=(2, 4),
            folds=folds[rows],
            bounds=bounds[rows],
        )
        return np.mean((answer - residual.predict(points)[0])[high])

    every = np.ones(count, dtype=bool)
    exactly, vaguely, blind = (
        error(taken, np.where(cut, bound, np.nan))
        for taken, bound in ((every, 0.1), (every, -5.0), (~cut, 0.1))
    )
    assert (
        0 < exactly < 0.8 * min(vaguely, blind)
    )  # low all the same: nobody said how much is missing


def test_folds_never_divide_an_architecture():
    groups = [f"a{i % 17}" for i in range(100)]
    folds = grouped_folds(groups, 5, np.random.default_rng(0))
    for name in set(groups):
        assert len({f for f, g in zip(folds, groups, strict=True) if g == name}) == 1
    assert set(folds) == set(range(5))


# Folds of clusters hold out similar workloads together, and divide no architecture.


def far_apart(centres, seed=0):
    """Ten architectures around each of some centres, three labels of each."""
    generator = np.random.default_rng(seed)
    middles = np.repeat(np.array(centres, dtype=float), 10, axis=0)
    middles += 0.1 * generator.normal(size=middles.shape)
    names = [f"a{number}" for number in range(len(middles)) for _ in range(3)]
    return np.repeat(middles, 3, axis=0) + 0.3 * generator.normal(size=(len(names), 2)), names


def test_distant_clusters_are_separate_folds_and_architectures_stay_whole():
    points, names = far_apart([(0, 0), (0, 9), (9, 0), (9, 9)])
    for seed in range(10):
        folds = cluster_folds(points, names, 4, np.random.default_rng(seed))
        by_centre = [set(part.tolist()) for part in np.split(folds, 4)]
        assert all(len(part) == 1 for part in by_centre)
        assert len(set.union(*by_centre)) == 4
        of_name = {}
        assert all(of_name.setdefault(n, f) == f for n, f in zip(names, folds, strict=True))


def test_drawn_rows_cover_sorted_labels_evenly():
    rows = draw_rows(4500, 1500)
    assert len(rows) == len(set(rows.tolist())) == 1500
    assert np.array_equal(rows, np.sort(rows))
    assert np.array_equal(rows, draw_rows(4500, 1500))
    assert np.bincount(rows % 3).min() > 400  # three batch sizes of each architecture
    assert np.array_equal(draw_rows(7, 10), np.arange(7))
