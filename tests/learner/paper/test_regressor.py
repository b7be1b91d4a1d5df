"""The paper's predictor: its faults are repaired, and it learns."""

import numpy as np
import pytest
from workload_samples import mape, targets, workloads

from trappm.learner.paper.estimators import paper_estimator


@pytest.fixture(scope="module")
def published(zoo, small):
    return paper_estimator("trappm-small", small.head, zoo.encoder)


@pytest.fixture(scope="module")
def split(zoo, measure):
    """Every fourth architecture is held out."""
    names = sorted(set(zoo.names))[::4]
    test = np.isin(zoo.names, names)
    return ~test, test, measure(zoo.graphs)[:, 0]


def chosen(items, rows):
    return [items[i] for i in np.flatnonzero(rows)]


def fitted(estimator, zoo, split, seed=0):
    train, _, values = split
    labels = targets(values[train], chosen(zoo.names, train))
    return estimator.fit(chosen(workloads(zoo), train), labels, np.random.default_rng(seed))


@pytest.fixture(scope="module")
def model(zoo, published, split):
    return fitted(published, zoo, split)


def test_the_regressor_predicts_unseen_architectures(zoo, split, model):
    train, test, values = split
    guess = np.exp(np.log(values[train]).mean())
    error = mape(model, chosen(workloads(zoo), test), values[test])
    assert error < 0.25
    assert error < 0.3 * np.mean(np.abs(guess / values[test] - 1))
