"""Solving by factors is what the direct formulas say, and keeps its digits where they lose them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trappm.learner.acquisition.covariance import Covariance
from trappm.learner.acquisition.reduction import Knowledge
from trappm.learner.stats.student_t import (
    backward_solved,
    cholesky,
    forward_solved,
    half_widths,
    precisions,
    solve,
)


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


def test_factors_keep_the_digits_that_an_inverse_loses():
    """Of labels that are nearly copies, as batch sizes of one architecture are."""
    covariance, _, generator = process(0, n=40, spread=0.3)
    matrix = covariance + 1e-11 * np.eye(40)
    weights = generator.normal(0, 1, 40)
    values = matrix @ weights
    factor = cholesky(matrix)
    solved = backward_solved(factor, forward_solved(factor, values))
    by_factor = np.abs(matrix @ solved - values).max()
    by_inverse = np.abs(matrix @ (np.linalg.inv(matrix) @ values) - values).max()
    assert by_factor < 0.01 * by_inverse
    assert by_factor < 1e-12 * np.abs(values).max() * 40


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


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20)
def test_what_a_pool_knows_is_what_the_inverse_says(seed):
    """Also after labels: the covariance of the pool, reduced as if they had come one by one."""
    generator = np.random.default_rng(seed)
    features = generator.normal(0, 1, (30, 6)).astype(np.float32)
    known, noise = np.array([2, 7, 11]), 0.1
    factor = generator.uniform(1.0, 3.0, 30)
    knowledge = Knowledge(Covariance(features, noise), known, factor)
    knowledge.learn(20)
    seen = np.array([*known, 20])
    wide = features.astype(np.float64)
    inner = np.linalg.inv(np.eye(6) + wide[seen].T @ (wide[seen] / (noise * factor[seen, None])))
    covariance = wide @ inner @ wide.T
    np.testing.assert_allclose(knowledge.variance, np.diag(covariance), rtol=1e-3, atol=1e-5)
    gains = (covariance**2).sum(axis=0) / (np.diag(covariance) + noise * factor)
    np.testing.assert_allclose(knowledge.gains(), gains, rtol=2e-3, atol=1e-4)
