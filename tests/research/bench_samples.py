"""Samples of the bench, of which all are judged unless a test says otherwise."""

import numpy as np

from research.evaluation.benchmark import Samples


def bench_samples(configurations, workloads, values=None, **fields):
    n = len(configurations)
    values = np.arange(1.0, n + 1) if values is None else values
    given = {
        "above": np.full(n, np.nan),
        "judged": ~np.isnan(values),
        "spiked": np.zeros(n, dtype=bool),
        **fields,
    }
    return Samples(configurations, workloads, values, **given)
