"""The quick learner: it knows something without labels, learns from few, and states its doubts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.replay.joint import Joint, PoolPoints, half_widths, solve
from trappm.learner.acquisition.pool_covariance import PoolPosterior
from trappm.learner.estimator import Targets
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.stats.student_t import precisions
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
    left = PoolPosterior(covariance, train, None).variance[test]
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


def process(seed, n=12, spread=1.0):
    generator = np.random.default_rng(seed)
    points = generator.normal(0, spread, (n, 3))
    squares = ((points[:, None] - points[None]) ** 2).sum(axis=2)
    return np.exp(-squares / 2), generator.normal(0, 1, n), generator


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_a_solution_is_that_of_the_inverse(seed, steps):
    covariance, values, generator = process(seed)
    solved = solve(covariance, values, 0.3, steps=steps, least_noise=0.01)
    before = (
        solve(covariance, values, 0.3, steps=steps - 1, least_noise=0.01) if steps > 1 else None
    )
    precision = np.full(12, 1 / 0.3**2) if before is None else before.precision
    inverse = np.linalg.inv(covariance + np.diag(1 / precision))
    np.testing.assert_allclose(solved.weights, inverse @ values, rtol=1e-7, atol=1e-9)
    squares = (solved.weights / precision) ** 2
    squares += (1 - np.diag(inverse) / precision) / precision
    np.testing.assert_allclose(solved.precision, precisions(squares, solved.noise), rtol=1e-6)

    across = generator.normal(0, 1, (5, 12))
    np.testing.assert_allclose(
        solved.explained(across), np.diag(across @ inverse @ across.T), rtol=1e-7
    )
    rows = np.array([1, 4, 9])
    block = np.linalg.inv(inverse[np.ix_(rows, rows)])
    errors, spread = solved.unseen(rows)
    np.testing.assert_allclose(errors, block @ solved.weights[rows], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(spread, np.diag(block), rtol=1e-6)


def test_labels_unseen_are_what_the_others_predict():
    covariance, values, _ = process(3)
    solved = solve(covariance, values, 0.3, steps=1, least_noise=0.01)
    noisy = covariance + np.eye(12) * 0.3**2
    rows, others = np.array([0, 5]), np.array([1, 2, 3, 4, 6, 7, 8, 9, 10, 11])
    cross = np.linalg.solve(noisy[np.ix_(others, others)], noisy[np.ix_(others, rows)])
    errors, spread = solved.unseen(rows)
    np.testing.assert_allclose(errors, values[rows] - cross.T @ values[others], rtol=1e-8)
    left = noisy[np.ix_(rows, rows)] - cross.T @ noisy[np.ix_(others, rows)]
    np.testing.assert_allclose(spread, np.diag(left), rtol=1e-8)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_intervals_hold_what_they_say_of_normal_values_with_student_errors(share, coverage):
    generator = np.random.default_rng(4)
    n = 400_000
    process_part = np.sqrt(1 - share) * generator.standard_normal(n)
    drawn = process_part + np.sqrt(share) * generator.standard_t(4, n)
    half = half_widths(np.array([1 - share]), np.sqrt(share), coverage)
    assert np.mean(np.abs(drawn) < half[0]) == pytest.approx(coverage, abs=0.003)


def test_an_interval_is_normal_without_errors_and_of_student_with_nothing_else():
    assert half_widths(np.array([4.0]), 1e-9, 0.9)[0] == pytest.approx(2 * 1.6449, rel=1e-3)
    assert half_widths(np.array([0.0]), 0.5, 0.9)[0] == pytest.approx(0.5 * 2.1318, rel=1e-3)
