"""Acquisition: what is never picked, that the algebra is right, and that it beats chance."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.acquisition import (
    NOISE_VARIANCE,
    AcquisitionRequest,
    strategy_named,
)
from learner.kernel import LANDMARKS, pool_features
from profiler.errors import InputError

NAMES = ("random", "variance")


def request(n=60, seed=0, count=8, **options):
    """A pool of clusters of unequal size, some of it labelled."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(0, 3, (8, 12))
    cluster = generator.choice(8, n, p=[0.3, 0.25, 0.2, 0.1, 0.05, 0.04, 0.03, 0.03])
    embeddings = (centres[cluster] + generator.normal(0, 0.5, (n, 12))).astype(np.float32)
    values = {
        "embeddings": embeddings,
        "static_features": np.exp(generator.normal(3, 1, (n, 6))),
        "labelled": np.arange(0, n, 10),
        "pending": np.arange(1, n, 20),
        "candidates": np.arange(n),
        "count": count,
        "generator": np.random.default_rng(seed + 1),
    }
    return AcquisitionRequest(**{**values, **options})


def full_covariance(asked):
    features = pool_features(
        asked.embeddings, np.log1p(asked.static_features), np.random.default_rng(0)
    ).astype(np.float64)
    return features @ features.T


def posterior_variance(covariance, known):
    """Average variance over the pool when these are known, from the full matrix."""
    part = covariance[:, known]
    inner = covariance[np.ix_(known, known)] + NOISE_VARIANCE * np.eye(len(known))
    explained = np.einsum("nk,kn->n", part, np.linalg.solve(inner, part.T))
    return float(np.mean(np.diag(covariance) - explained))


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000), count=st.integers(0, 12), step=st.integers(2, 4))
@settings(max_examples=25, deadline=None)
def test_only_open_candidates_are_picked_each_once(name, seed, count, step):
    asked = request(seed=seed, count=count, candidates=np.arange(0, 60, step))
    picks = [pick.index for pick in strategy_named(name).select(asked)]
    assert len(picks) == len(set(picks)) == count
    assert set(picks) <= set(asked.candidates.tolist())
    assert not set(picks) & {*asked.labelled.tolist(), *asked.pending.tolist()}


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_picks(name):
    first, second = (strategy_named(name).select(request(n=700, seed=4)) for _ in range(2))
    assert first == second


def test_a_random_draw_follows_its_generator():
    picks = [
        strategy_named("random").select(request(generator=np.random.default_rng(s))) for s in (1, 2)
    ]
    assert picks[0] != picks[1]


@pytest.mark.parametrize("seed", range(3))
def test_variance_is_the_greedy_choice_of_the_full_covariance(seed):
    asked = request(n=40, seed=seed, count=6)
    covariance = full_covariance(asked)
    known = asked.known.tolist()
    for pick in strategy_named("variance").select(asked):
        left = sorted(set(asked.open.tolist()) - set(known))
        after = {i: posterior_variance(covariance, [*known, i]) for i in left}
        assert after[pick.index] == pytest.approx(min(after.values()), rel=1e-3)
        gained = posterior_variance(covariance, known) - after[pick.index]
        share = gained / np.mean(np.diag(covariance))
        assert pick.reason["variance_reduction"] == pytest.approx(share, rel=0.02, abs=1e-5)
        known.append(pick.index)


@pytest.mark.parametrize("n", [200, LANDMARKS + 100])
def test_variance_leaves_less_variance_than_chance(n):
    asked = request(n=n, count=10)
    covariance = full_covariance(asked)

    def left_by(name, seed):
        picks = strategy_named(name).select(
            replace(asked, generator=np.random.default_rng(seed))
        )  # fmt: skip
        return posterior_variance(covariance, [*asked.known, *(p.index for p in picks)])

    assert left_by("variance", 0) < min(left_by("random", seed) for seed in range(10))


def test_pending_counts_as_known():
    asked = request(
        count=1, labelled=np.zeros(0, dtype=np.int64), pending=np.zeros(0, dtype=np.int64)
    )
    first = strategy_named("variance").select(asked)[0].index
    again = strategy_named("variance").select(replace(asked, pending=np.array([first])))[0].index
    both = [p.index for p in strategy_named("variance").select(replace(asked, count=2))]
    assert [first, again] == both


def test_picks_lean_to_where_the_heads_disagree():
    asked = request(n=200, count=10)
    doubted = np.zeros(200, dtype=bool)
    doubted[::2] = True
    uncertainty = np.where(doubted, 1.0, 0.05)
    plain, leaning = (
        sum(doubted[p.index] for p in strategy_named("variance").select(r))
        for r in (asked, replace(asked, uncertainty=uncertainty))
    )
    assert leaning > plain
    assert leaning >= 8


def test_a_batch_does_not_crowd_at_the_most_uncertain_spot():
    """Sixty copies of one configuration, all very uncertain: two of a batch are enough."""
    asked = request(n=120, count=8)
    embeddings, static = asked.embeddings.copy(), asked.static_features.copy()
    embeddings[60:], static[60:] = embeddings[2], static[2]
    uncertainty = np.where(np.arange(120) >= 60, 5.0, 1.0)
    asked = replace(asked, embeddings=embeddings, static_features=static, uncertainty=uncertainty)
    asked = replace(asked, labelled=asked.labelled[:5], pending=asked.pending[:2])
    picks = [p.index for p in strategy_named("variance").select(asked)]
    assert sum(i >= 60 for i in picks) <= 3


def test_a_large_pool_is_chosen_from_without_a_square_matrix():
    n = 8_000
    picks = strategy_named("variance").select(request(n=n, count=16))
    assert len({p.index for p in picks}) == 16
    asked = request(n=n)
    features = pool_features(
        asked.embeddings, np.log1p(asked.static_features), np.random.default_rng(0)
    )
    assert features.shape[0] == n
    assert features.shape[1] <= LANDMARKS + 6


def test_every_pick_has_its_reasons():
    asked = request(count=3, uncertainty=np.linspace(0.1, 1, 60), predicted_cost=np.arange(60.0))
    for rank, pick in enumerate(strategy_named("variance").select(asked)):
        assert pick.reason["rank"] == rank
        assert pick.reason["uncertainty"] == pytest.approx(asked.uncertainty[pick.index], abs=1e-3)
        assert pick.reason["predicted_step_time_ms"] == pick.index
        assert pick.reason["distance_to_nearest_label"] > 0
        assert pick.reason["variance_reduction"] > 0


def test_it_works_before_anything_is_known_and_on_equal_configurations():
    nothing = np.zeros(0, dtype=np.int64)
    asked = request(labelled=nothing, pending=nothing)
    assert len(strategy_named("variance").select(asked)) == 8
    alike = request(embeddings=np.ones((60, 12), np.float32), static_features=np.ones((60, 6)))
    assert len({p.index for p in strategy_named("variance").select(alike)}) == 8


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="did you mean 'random'"):
        strategy_named("randon")
    with pytest.raises(InputError, match="asked for"):
        request(count=10, candidates=np.arange(5))
    with pytest.raises(InputError, match="rows for a pool of 60"):
        request(uncertainty=np.ones(59))
    with pytest.raises(InputError, match="outside the pool"):
        request(labelled=np.array([60]))
