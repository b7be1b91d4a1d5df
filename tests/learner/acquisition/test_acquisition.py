"""Acquisition: what is never picked, that the algebra is right, and that it beats chance."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_samples import request

import trappm.profiler.models.zoo  # noqa: F401  (before timm)
from trappm.learner.acquisition import (
    STRATEGIES,
    PoolCovariance,
    strategy_named,
)
from trappm.learner.acquisition.embedding_space import NOISE_VARIANCE, embedding_features
from trappm.learner.acquisition.pool_covariance import PoolPosterior
from trappm.learner.acquisition.pool_knowledge import PoolKnowledge
from trappm.learner.acquisition.pool_variance import PoolReduction, taught_by_bounds
from trappm.learner.acquisition.strategies import Representation
from trappm.learner.gaussian_process import matern32
from trappm.learner.interface import Workload
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.step_time import StepTimePrior
from trappm.profiler.devices.catalogue import spec_of
from trappm.profiler.errors import InputError
from trappm.profiler.trace import trace

EVERY = list(STRATEGIES)


def unlabelled(**options):
    """The same pool without labels."""
    none = np.zeros(0, dtype=np.int64)
    return request(labelled=none, **options)


def picks_of(name, query, **options):
    return [pick.index for pick in strategy_named(name, **options).select(query)]


def picks_by(strategy, query):
    return [pick.index for pick in strategy.select(query)]


def represented_best(query):
    """Greedy picks by `Representation` alone, which is facility location."""
    pool, chosen = Representation(query.points, query.known, np.random.default_rng(0)), []
    for _ in range(query.count):
        gains = pool.gains()
        gains[[*query.known, *chosen]] = -1.0
        chosen.append(int(np.argmax(gains)))
        pool.learn(chosen[-1])
    return chosen


VARIANCE_ALONE = PoolReduction("variance of the covariances alone")


def full_covariance(query):
    features = embedding_features(
        query.embeddings, np.log1p(query.static_features), np.random.default_rng(0)
    ).astype(np.float64)
    return features @ features.T


def posterior_variance(covariance, known):
    """Average variance over the pool when these are known, from the full matrix."""
    part = covariance[:, known]
    inner = covariance[np.ix_(known, known)] + NOISE_VARIANCE * np.eye(len(known))
    explained = np.einsum("nk,kn->n", part, np.linalg.solve(inner, part.T))
    return float(np.mean(np.diag(covariance) - explained))


@pytest.mark.parametrize("name", EVERY)
@given(seed=st.integers(0, 10_000), count=st.integers(0, 12), step=st.integers(2, 4))
@settings(max_examples=10, deadline=None)
def test_only_open_candidates_are_picked_once_each(name, seed, count, step):
    query = request(seed=seed, count=count, candidates=np.arange(0, 60, step))
    picks = picks_of(name, query)
    assert len(picks) == len(set(picks)) == count
    assert set(picks) <= set(query.candidates.tolist())
    assert not set(picks) & {*query.labelled.tolist()}


@pytest.mark.parametrize("name", EVERY)
def test_equal_seeds_give_equal_picks(name):
    first, second = (strategy_named(name).select(request(n=700, seed=4)) for _ in range(2))
    assert first == second


def test_variance_picks_the_greedy_optimum():
    query = request(n=40, count=6, uncertainty=None)
    covariance = full_covariance(query)
    known = query.known.tolist()
    for pick in strategy_named("variance").select(query):
        left = sorted(set(query.open.tolist()) - set(known))
        after = {i: posterior_variance(covariance, [*known, i]) for i in left}
        assert after[pick.index] == pytest.approx(min(after.values()), rel=1e-3)
        gained = posterior_variance(covariance, known) - after[pick.index]
        share = gained / np.mean(np.diag(covariance))
        assert pick.reason["variance_reduction"] == pytest.approx(share, rel=0.02, abs=1e-5)
        known.append(pick.index)


def test_uncertain_configurations_are_preferred():
    doubted = np.arange(200) % 2 == 0
    query = request(n=200, count=10, uncertainty=np.where(doubted, 1.0, 0.05))
    assert sum(doubted[picks_of("variance", query)]) >= 8


# What each strategy is about.


@pytest.mark.parametrize("name", [n for n in EVERY if n != "uncertainty"])
def test_strategies_work_without_labels(name):
    query = unlabelled(uncertainty=None)
    assert len(set(picks_of(name, query))) == 8
    ones = np.ones((60, 12), np.float32)
    equal = replace(query, embeddings=ones, static_features=np.ones((60, 6)))
    assert len(set(picks_of(name, equal))) == 8


def test_uncertainty_picks_the_most_uncertain_and_needs_heads():
    doubt = np.random.default_rng(3).random(60)
    picked = picks_of("uncertainty", request(uncertainty=doubt))
    left = np.setdiff1d(request().open, picked)
    assert doubt[picked].min() > doubt[left].max()
    with pytest.raises(InputError, match="begin with another"):
        picks_of("uncertainty", request(uncertainty=None))


# Ours.


def of_metric(n=60, seed=5, width=10, noise=0.1):
    generator = np.random.default_rng(seed)
    return PoolCovariance(generator.normal(0, 1, (n, width)).astype(np.float32), noise)


def test_the_value_of_a_bound_agrees_with_truncated_normals():
    values = np.random.default_rng(0).normal(size=400_000)
    for limit in (-1.0, 0.0, 1.5):
        died = values > limit
        left = died.mean() * values[died].var()
        assert taught_by_bounds(np.array([died.mean()]))[0] == pytest.approx(1 - left, abs=0.01)


def test_runs_that_will_fail_are_not_picked():
    covariance = of_metric()
    query = request(covariances=[covariance], count=10)
    first = picks_of("ours", query)
    sure = np.where(np.isin(np.arange(60), first), 0.999999, 0.0)
    assert not set(picks_of("ours", replace(query, failure=sure))) & set(first)
    borderline = np.where(np.isin(np.arange(60), first), 0.3, 0.0)
    assert set(picks_of("ours", replace(query, failure=borderline))) & set(first)


def test_gains_per_second_buy_cheaper_runs():
    cost = np.exp(np.random.default_rng(8).normal(0, 1, 60))
    query = request(covariances=[of_metric()], predicted_cost=cost, count=10)
    plain, cheap = (sum(cost[picks_of("ours", query, cost=paid)]) for paid in (False, True))
    assert cheap < plain / 2


def test_one_batch_serves_all_metrics():
    """Two metrics that live in different halves of the pool: each alone never asks the other's."""
    halves = []
    for half in (slice(0, 30), slice(30, 60)):
        covariance = of_metric()
        features = np.zeros_like(covariance.features)
        features[half] = covariance.features[half]
        halves.append(PoolCovariance(features, 0.1))
    query = unlabelled(count=8)
    for covariances, expected in (([halves[0]], 8), ([halves[1]], 0), (halves, 4)):
        picked = picks_of("ours", replace(query, covariances=covariances))
        assert sum(i < 30 for i in picked) == pytest.approx(expected, abs=1)


def test_units_of_metrics_do_not_matter():
    first, second = of_metric(seed=1), of_metric(seed=2)
    louder = PoolCovariance(second.features * 30, second.noise * 900)
    query = request(count=10)
    plain, scaled = (
        picks_of("ours", replace(query, covariances=[first, c])) for c in (second, louder)
    )
    assert plain == scaled


def test_noisy_configurations_are_picked_last():
    query = request(covariances=[of_metric()], count=1)
    best = picks_of("ours", query)[0]
    noise = np.ones(60)
    noise[best] = 100.0
    assert picks_of("ours", replace(query, noise_factor=noise)) != [best]
    alone = replace(query, noise_factor=noise, candidates=np.array([best]))
    assert picks_of("ours", alone) == [best]


def test_variance_alone_decides_on_a_second_device():
    """What is left there is a difference, which the neighbourhood of a label says little of."""
    query = unlabelled(covariances=[of_metric()], count=10)
    taught = replace(query, taught=True)
    assert picks_of("ours", taught) == picks_by(VARIANCE_ALONE, query) != picks_of("ours", query)
    networks = replace(taught, covariances=())
    assert picks_of("ours", networks) == represented_best(query)
    assert "representation" not in strategy_named("ours").select(taught)[0].reason


def test_nan_values_are_refused():
    doubt = np.ones(60)
    doubt[7] = np.nan
    for name in ("uncertainty", "failure", "predicted_cost", "noise_factor"):
        with pytest.raises(InputError, match=f"{name} has no number for configuration 7"):
            request(**{name: doubt})
    spoiled = of_metric().features.copy()
    spoiled[5, 3] = np.nan
    with pytest.raises(InputError, match=r"covariances\[0\] has no number for configuration 5"):
        request(covariances=[PoolCovariance(spoiled, 0.1)])


def represented(points, known):
    """The sum over the pool of the likeness to the nearest that is known."""
    return float(matern32(points, points[known]).max(axis=1).sum()) if len(known) else 0.0


@given(seed=st.integers(0, 1_000), known=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_representation_gains_equal_the_change_of_the_sum(seed, known):
    query = request(n=40, seed=seed)
    have = np.random.default_rng(seed).permutation(40)[:known]
    pool = Representation(query.points, have, np.random.default_rng(0))
    for _ in range(3):
        before = represented(query.points, have)
        gains = pool.gains()
        for index in (0, 7, 39):
            after = represented(query.points, np.append(have, index))
            assert gains[index] == pytest.approx(after - before, abs=1e-3)
        best = int(np.argmax(gains))
        pool.learn(best)
        have = np.append(have, best)
    assert pool.total == pytest.approx(40)
    assert pool.gains()[have] == pytest.approx(0.0, abs=1e-3)


def test_picks_combine_variance_and_representation():
    """Twenty copies of which nothing is to be learned, five with one that teaches, five loners with
    one that teaches more: the sum of both shares would take one of the twenty."""
    places = 40.0 * np.random.default_rng(0).normal(0, 1, (7, 12))
    place = [0] * 20 + [1] * 5 + [2, 3, 4, 5, 6]
    features = np.zeros((30, 30), np.float32)
    features[22, 22], features[27, 27] = 0.9, 1.2
    query = unlabelled(
        n=30, embeddings=places[place].astype(np.float32), static_features=np.ones((30, 1)),
        covariances=[PoolCovariance(features, 0.1)], count=1,
    )  # fmt: skip
    assert picks_of("ours", query) == [22]


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20)
def test_the_pool_posterior_agrees_with_the_matrix_inverse(seed):
    """Also after labels: the covariance of the pool, reduced as if they had come one by one."""
    generator = np.random.default_rng(seed)
    features = generator.normal(0, 1, (30, 6)).astype(np.float32)
    known, noise = np.array([2, 7, 11]), 0.1
    factor = generator.uniform(1.0, 3.0, 30)
    knowledge = PoolPosterior(PoolCovariance(features, noise), known, factor)
    knowledge.learn(20)
    seen = np.array([*known, 20])
    wide = features.astype(np.float64)
    inner = np.linalg.inv(np.eye(6) + wide[seen].T @ (wide[seen] / (noise * factor[seen, None])))
    covariance = wide @ inner @ wide.T
    np.testing.assert_allclose(knowledge.variance, np.diag(covariance), rtol=1e-3, atol=1e-5)
    gains = (covariance**2).sum(axis=0) / (np.diag(covariance) + noise * factor)
    np.testing.assert_allclose(knowledge.gains(), gains, rtol=2e-3, atol=1e-4)


# What is known of a pool before labels, with kernels, without, and with those of a part of it.


ARCHITECTURES = ("test_resnet", "test_vit", "test_efficientnet")


@pytest.fixture(scope="module")
def traced():
    workloads_with_kernels = []
    for name in ARCHITECTURES:
        traced = trace(name, 64)
        workloads_with_kernels += [
            Workload(graph=traced.graph.at(batch), kernels=traced.kernels) for batch in (1, 8, 64)
        ]
    return workloads_with_kernels


def known(workloads, metrics=("step_time_ms",), **options):
    generator = np.random.default_rng(0)
    return PoolKnowledge.of(workloads, metrics, spec_of("a100"), generator, **options)


def test_workloads_without_kernels_are_estimated_separately(traced):
    mixed = [replace(w, kernels=None) if i < 3 else w for i, w in enumerate(traced)]
    knowledge, whole = known(mixed), known(traced)
    features = knowledge.covariances["step_time_ms"].features
    between = features[:3] @ features[3:].T
    assert between == pytest.approx(0.0)
    assert (features[:3] @ features[:3].T).min() > 0
    assert knowledge.estimates["step_time_ms"].median[3:] == pytest.approx(
        whole.estimates["step_time_ms"].median[3:]
    )
    alone = known([replace(w, kernels=None) for w in traced[:3]])
    assert knowledge.estimates["step_time_ms"].median[:3] == pytest.approx(
        alone.estimates["step_time_ms"].median
    )


def test_a_second_device_is_uncertain_in_how_devices_differ(traced):
    """Of step times that kernels explain; of graphs and memory nothing of the kind is known."""
    metrics = ("step_time_ms", "memory_mib")
    plain, second = known(traced, metrics), known(traced, metrics, others=known_devices())
    devices = known_devices()
    start = StepTimePrior(spec_of("a100"), devices.centre, between=devices.spreads)
    moves = start.sensitivities(traced)

    def left_of(known):
        features = known.covariances["step_time_ms"].features
        return np.linalg.norm(features @ features.T - moves @ moves.T) / np.linalg.norm(moves) ** 2

    assert left_of(second) < 0.2 < left_of(plain)
    same = [k.covariances["memory_mib"].features for k in (plain, second)]
    assert np.array_equal(*same)
    untraced = [replace(w, kernels=None) for w in traced]
    alone = [known(untraced, others=others) for others in (None, known_devices())]
    assert np.array_equal(*(k.covariances["step_time_ms"].features for k in alone))


def test_rows_of_the_pool_keep_their_estimates(traced):
    rows = np.array([7, 2])
    whole = known(traced)
    part = whole.of_rows(rows)
    for got, every in (
        (part.covariances["step_time_ms"].features, whole.covariances["step_time_ms"].features),
        (part.estimates["step_time_ms"].median, whole.estimates["step_time_ms"].median),
    ):
        assert np.array_equal(got, every[rows])
