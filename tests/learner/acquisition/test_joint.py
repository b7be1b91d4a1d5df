"""The quick learner: it knows something without labels, learns from few, and states its doubts."""

import numpy as np
import pytest

from trappm.learner.acquisition.joint import Joint, PoolPoints
from trappm.learner.acquisition.reduction import Knowledge
from trappm.learner.estimator import Targets
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.profiler.errors import InputError

METRIC = "step_time_ms"


@pytest.fixture(scope="module")
def pool(zoo, measure):
    workloads, names = zoo.workloads(range(len(zoo.graphs)))
    return workloads, names, measure(zoo.graphs, noise_seed=3)[:, 0]


def learner(workloads):
    prior = GraphPrior(METRIC)
    return Joint(prior, PoolPoints.of(prior, workloads))


def fit(pool, rows, above=None):
    workloads, names, values = pool
    values = values[rows].copy()
    bounds = np.full(len(rows), np.nan)
    if above is not None:
        values[above], bounds[above] = np.nan, values[above] * 0.9
    targets = Targets(values, bounds, [names[i] for i in rows])
    return learner(workloads).fit([workloads[i] for i in rows], targets, np.random.default_rng(0))


def errors(model, pool, rows):
    workloads, _, values = pool
    predicted = model.predict([workloads[i] for i in rows])
    return np.abs(np.log(predicted.median / values[rows])), predicted


def split(pool, labels, seed=0):
    names = np.array(pool[1])
    held_out = np.random.default_rng(seed).permutation(sorted(set(names)))[:8]
    test = np.flatnonzero(np.isin(names, held_out))
    train = np.random.default_rng(seed + 1).permutation(np.flatnonzero(~np.isin(names, held_out)))
    return train[:labels], test


def test_without_labels_it_says_what_the_prior_says(pool):
    workloads = pool[0]
    model = fit(pool, np.zeros(0, dtype=int))
    prior = np.exp(GraphPrior(METRIC).log_values(workloads))
    assert model.predict(workloads).median == pytest.approx(prior)


def test_errors_fall_with_labels_on_new_architectures(pool):
    means = []
    for labels in (0, 8, 60):
        train, test = split(pool, labels)
        means.append(errors(fit(pool, train), pool, test)[0].mean())
    assert means[0] > 3 * means[1] > 3 * means[2]
    assert means[2] < 0.1


def test_doubt_is_large_where_errors_are_and_falls_with_labels(pool):
    few, test = split(pool, 8)
    many, _ = split(pool, 60)
    gaps, before = errors(fit(pool, few), pool, test)
    _, after = errors(fit(pool, many), pool, test)
    assert after.log_std_of_mean.mean() < before.log_std_of_mean.mean()
    assert np.mean(gaps < 3 * before.log_std) > 0.9


def test_single_wild_labels_do_little_harm(pool):
    workloads, names, values = pool
    train, test = split(pool, 40)
    plain = errors(fit(pool, train), pool, test)[0].mean()
    wild = values.copy()
    wild[train[:3]] *= 8.0
    spoilt = errors(fit((workloads, names, wild), train), pool, test)[0].mean()
    assert spoilt < plain + 0.1


def test_a_bound_pulls_only_from_below(pool):
    """Bounds at nine tenths of the truth keep a model from saying far less."""
    train, _ = split(pool, 30)
    bounded = np.zeros(30, dtype=bool)
    bounded[20:] = True
    model = fit(pool, train, above=bounded)
    workloads, _, values = pool
    predicted = model.predict([workloads[i] for i in train[20:]]).median
    assert np.all(predicted > 0.6 * values[train[20:]])


def test_its_covariance_is_that_of_its_doubts(pool):
    """Variances without labels, from features, are those that predictions state."""
    workloads = pool[0]
    model = fit(pool, np.zeros(0, dtype=int))
    covariance = model.covariance(workloads, np.random.default_rng(0))
    predicted = model.predict(workloads).log_std_of_mean
    assert covariance.deviation == pytest.approx(predicted, rel=0.02)


def test_the_covariance_of_a_fitted_learner_leaves_what_its_predictions_doubt(pool):
    """Once its labels count as known; wild labels, which count less, are what differs."""
    workloads = pool[0]
    train, test = split(pool, 20)
    model = fit(pool, train)
    covariance = model.covariance(workloads, np.random.default_rng(0))
    left = Knowledge(covariance, train, None).variance[test]
    doubt = model.predict([workloads[i] for i in test]).log_std_of_mean ** 2
    assert np.median(left / doubt) == pytest.approx(1.0, abs=0.2)
    assert np.all(left <= covariance.deviation[test] ** 2)


def test_labels_that_scatter_raise_what_a_fitted_learner_expects_of_the_rest(pool):
    workloads, names, values = pool
    train, _ = split(pool, 30)
    scattered = values * np.exp(np.random.default_rng(5).normal(0, 0.8, len(values)))
    calm, wild = (
        fit((workloads, names, v), train).covariance(workloads, np.random.default_rng(0))
        for v in (values, scattered)
    )
    assert wild.noise > 2 * calm.noise


def test_a_start_is_refused(pool):
    workloads = pool[0]
    model = fit(pool, np.zeros(0, dtype=int))
    targets = Targets(np.ones(1), np.full(1, np.nan), ["a"])
    with pytest.raises(InputError, match="starts from no other"):
        learner(workloads).fit(workloads[:1], targets, np.random.default_rng(0), model)
