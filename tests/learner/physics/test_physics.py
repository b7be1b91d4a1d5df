"""The physical prior: its terms, and what a few labels make of its coefficients."""

import numpy as np
import pytest

from trappm.learner.physics.graph_prior import PRIORS, term_matrix
from trappm.learner.physics.prior import fit_coefficients, log_prior

SPEC = PRIORS["step_time_ms"]
NAMES = list(SPEC.spreads)


def mape(predicted_log, values):
    return 100 * np.mean(np.abs(np.exp(predicted_log) / values - 1))


def step_time_terms(graphs):
    return term_matrix(graphs, "step_time_ms")


@pytest.mark.parametrize("metric", PRIORS)
def test_terms_are_finite_never_negative_and_never_all_zero(zoo, metric):
    terms = term_matrix(zoo.graphs, metric)
    assert terms.shape == (len(zoo.graphs), len(PRIORS[metric].spreads))
    assert np.all(np.isfinite(terms))
    assert np.all(terms >= 0)
    assert np.all(terms.sum(axis=1) > 0)


def test_convolutions_have_terms_of_their_own(build_network):
    def macs(kind):
        (row,) = step_time_terms([build_network(kind, 40, 4, 2)])
        return {
            n: row[NAMES.index(f"macs_{n}")] for n in ("dense", "pointwise", "grouped", "matmul")
        }

    depthwise, residual, mixer = macs("depthwise"), macs("residual"), macs("mixer")
    assert depthwise["grouped"] > 0
    assert depthwise["pointwise"] > 0
    assert residual["grouped"] == residual["pointwise"] == 0
    assert residual["dense"] > 10 * residual["matmul"]
    assert mixer["matmul"] > 10 * mixer["dense"]


def test_all_work_terms_double_with_the_batch(build_network):
    single, double = (build_network("residual", 16, 3, b) for b in (4, 8))
    rows = step_time_terms([single, double])
    fixed = [NAMES.index(n) for n in ("step", "launch", "traffic_weights")]
    np.testing.assert_allclose(rows[1, fixed], rows[0, fixed])
    work = [i for i in range(len(NAMES)) if i not in fixed]
    np.testing.assert_allclose(rows[1, work], 2 * rows[0, work])


def test_a_fit_recovers_the_coefficients_of_generated_labels(zoo):
    terms = step_time_terms(zoo.graphs)
    truth = np.random.default_rng(0).normal(2.0, 0.5, len(NAMES))
    values = terms @ np.exp(truth)
    fitted = fit_coefficients(terms[::2], np.log(values[::2]), SPEC)
    assert mape(log_prior(terms[1::2], fitted), values[1::2]) < 2


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e4])
def test_the_level_of_a_device_needs_four_labels(zoo, measure, factor):
    terms = step_time_terms(zoo.graphs)
    values = factor * measure(zoo.graphs)[:, 0]
    chosen = np.random.default_rng(1).permutation(len(values))[:4]
    fitted = fit_coefficients(terms[chosen], np.log(values[chosen]), SPEC)
    assert mape(log_prior(terms, fitted), values) < 60


def test_one_wild_label_changes_little(zoo, measure):
    terms = step_time_terms(zoo.graphs)
    values = measure(zoo.graphs)[:, 0]
    logs = np.log(values)
    wild = logs.copy()
    wild[5] += 3.0
    clean, robust = (fit_coefficients(terms, x, SPEC) for x in (logs, wild))
    assert mape(log_prior(terms, clean), values) < 5
    assert mape(log_prior(terms, robust), values) < 7


def test_a_fit_without_labels_keeps_the_center(zoo):
    centre = np.linspace(-1, 1, len(NAMES))
    terms = step_time_terms(zoo.graphs[:0])
    fitted = fit_coefficients(terms, np.zeros(0), SPEC, centre=centre)
    np.testing.assert_array_equal(fitted, centre)
