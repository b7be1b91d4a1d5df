"""Folds of clusters hold out what is alike together, and divide no architecture."""

import numpy as np

from trappm.learner.stats.folds import cluster_folds, drawn_rows


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


def test_identical_points_share_a_fold():
    names = ["a", "a", "b", "c"]
    folds = cluster_folds(
        np.array([[0.0], [2.0], [1.0], [5.0]]), names, 5, np.random.default_rng(0)
    )
    assert len(set(folds.tolist())) == 2  # a and b lie at the same place
    assert folds[0] == folds[1] == folds[2] != folds[3]
    assert not cluster_folds(np.zeros((3, 1)), ["a"] * 3, 5, np.random.default_rng(0)).any()
    assert len(cluster_folds(np.zeros((0, 1)), [], 5, np.random.default_rng(0))) == 0


def test_drawn_rows_cover_sorted_labels_evenly():
    rows = drawn_rows(4500, 1500)
    assert len(rows) == len(set(rows.tolist())) == 1500
    assert np.array_equal(rows, np.sort(rows))
    assert np.array_equal(rows, drawn_rows(4500, 1500))
    assert np.bincount(rows % 3).min() > 400  # three batch sizes of each architecture
    assert np.array_equal(drawn_rows(7, 10), np.arange(7))
