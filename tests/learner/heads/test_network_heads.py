"""TraPPM's networks as heads: what the bench trains, kept in tensors, going on from others."""

from dataclasses import replace

import numpy as np
import pytest
from workload_samples import trained_heads as train

from trappm.learner.heads.physics_heads import heads_from_tensors
from trappm.learner.interface import Targets, Workload
from trappm.learner.paper.estimators import paper_estimator


@pytest.fixture(scope="module")
def networks(small):
    return replace(small, head=replace(small.head, physical_prior=False, steps=40, members=2))


@pytest.fixture(scope="module")
def trained(zoo, measure, networks):
    return train(zoo, np.arange(0, 96, 5), measure(zoo.graphs), networks)


def test_campaigns_and_benchmarks_train_the_same_networks(zoo, measure, networks):
    rows = np.arange(0, 96, 5)
    values = measure(zoo.graphs)[:, 0]
    heads = train(zoo, rows, np.stack([values, values * np.nan, values * np.nan], 1), networks)
    workloads, names = zoo.workloads(rows)
    graphs_alone = [Workload(graph=w.graph) for w in workloads]
    judged = paper_estimator("trappm-small", networks.head, zoo.encoder).fit(
        graphs_alone,
        Targets(values[rows], np.full(len(rows), np.nan), names),
        np.random.default_rng(0),
    )
    of_campaign, of_bench = heads.predict(workloads), judged.predict(graphs_alone)
    for name in ("median", "low", "high", "log_std"):
        np.testing.assert_allclose(
            getattr(of_campaign, name)[:, 0], getattr(of_bench, name), rtol=1e-4
        )


def test_heads_are_restored_from_tensors_and_settings(trained, zoo, networks):
    again = heads_from_tensors(networks.head, trained.settings(), trained.tensors())
    workloads = zoo.workloads(range(96))[0]
    for name in ("median", "low", "high", "log_std", "disagreement"):
        first, second = (getattr(h.predict(workloads), name) for h in (trained, again))
        np.testing.assert_array_equal(first, second)
