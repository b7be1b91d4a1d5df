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


def test_all_work_terms_double_with_the_batch(build_network):
    single, double = (build_network("residual", 16, 3, b) for b in (4, 8))
    rows = step_time_terms([single, double])
    fixed = [NAMES.index(n) for n in ("step", "launch", "traffic_weights")]
    np.testing.assert_allclose(rows[1, fixed], rows[0, fixed])
    work = [i for i in range(len(NAMES)) if i not in fixed]
    np.testing.assert_allclose(rows[1, work], 2 * rows[0, work])


@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_the_level_of_a_device_needs_four_labels(zoo, measure, factor):
    terms = step_time_terms(zoo.graphs)
    values = factor * measure(zoo.graphs)[:, 0]
    chosen = np.random.default_rng(1).permutation(len(values))[:4]
    fitted = fit_coefficients(terms[chosen], np.log(values[chosen]), SPEC)
    assert mape(log_prior(terms, fitted), values) < 60
