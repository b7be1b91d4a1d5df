"""Boosted trees as arrays say what XGBoost says, and refuse tensors that cannot be theirs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trappm.learner.residual import Growth, Trees, grow, join

xgboost = pytest.importorskip("xgboost")
GROWTH = Growth(rounds=12, max_depth=4, learning_rate=0.3)


def data(seed=0, rows=200):
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(rows, 5))
    return features, np.sign(features[:, 0]) + features[:, 1]


def booster_of(features, values, growth, seed):
    """The same model in the library's own form."""
    return xgboost.train(
        {
            "objective": "reg:absoluteerror",
            "tree_method": "hist",
            "max_depth": growth.max_depth,
            "eta": growth.learning_rate,
            "subsample": growth.subsample,
            "colsample_bynode": growth.column_share,
            "min_child_weight": growth.least_in_leaf,
            "seed": seed,
            "nthread": 1,
        },
        xgboost.DMatrix(features.astype(np.float32), values),
        num_boost_round=growth.rounds,
    )


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.integers(30, 600), st.integers(1, 7))
def test_trees_predict_what_xgboost_predicts(seed, rows, depth):
    features, values = data(seed, rows)
    growth = Growth(rounds=8, max_depth=depth, learning_rate=0.3)
    ours = grow(features, values, growth, seed)
    theirs = booster_of(features, values, growth, seed)
    points = np.vstack([features, 10 * data(seed + 1)[0]])
    expected = theirs.predict(xgboost.DMatrix(points.astype(np.float32)))
    np.testing.assert_allclose(ours.predict(points)[:, 0], expected, atol=1e-5)


def test_joined_trees_predict_what_each_predicts():
    features, values = data()
    models = [grow(features, values, GROWTH, s) for s in range(3)]
    together = join(models).predict(features)
    assert together.shape == (200, 3)
    for column, model in enumerate(models):
        np.testing.assert_allclose(together[:, column], model.predict(features)[:, 0])
    assert not np.array_equal(together[:, 0], together[:, 1])  # seeds matter


def test_a_tree_of_one_leaf_is_a_constant():
    model = grow(np.zeros((20, 2)), np.full(20, 3.0), GROWTH, 0)
    np.testing.assert_allclose(model.predict(np.ones((4, 2)))[:, 0], 3.0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("left", 10**6),
        ("right", -1),
        ("roots", 10**6),
        ("feature", -1),
        ("first", 99),
        ("depth", 10**9),
    ],
)
def test_inconsistent_tensors_are_refused(name, value):
    features, values = data()
    tensors = grow(features, values, GROWTH, 0).tensors()
    tensors[name] = torch.full(tensors[name].shape, value)
    with pytest.raises(ValueError, match="do not fit together"):
        Trees.from_tensors(tensors)
