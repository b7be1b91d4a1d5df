"""Each baseline learns what it can see, by one interface."""

from dataclasses import replace

import numpy as np
import pytest
from workload_samples import mape, targets, workloads

from research.peers.baselines import FakeTensor, mlp, xgboost
from research.peers.graph_networks import LAPTOP_SIZE, dippm, nnlqp
from trappm.profiler.errors import InputError

QUICK = replace(
    LAPTOP_SIZE, width=16, training=replace(LAPTOP_SIZE.training, steps=500, batch_nodes=1024)
)
NETWORKS = {"nnlqp": nnlqp, "dippm": dippm}


def estimator(name, steps=500):
    if name in NETWORKS:
        return NETWORKS[name](replace(QUICK, training=replace(QUICK.training, steps=steps)))
    return {"mlp": mlp, "xgboost": xgboost}[name]()


@pytest.mark.parametrize("name", [*NETWORKS, "mlp", "xgboost"])
def test_peer_predicts_unseen_architectures(name, zoo, measure):
    values = measure(zoo.graphs)[:, 0]
    test = np.isin(zoo.names, sorted(set(zoo.names))[::4])
    everything = np.array(workloads(zoo))
    groups = np.array(zoo.names)[~test]

    made = estimator(name)
    assert made.name == name
    model = made.fit(everything[~test], targets(values[~test], groups), np.random.default_rng(0))
    predicted = model.predict(everything[test]).median
    assert predicted.shape == (test.sum(),)
    typical = np.exp(np.log(values[~test]).mean())
    of_typical = np.mean(np.abs(typical / values[test] - 1))
    assert mape(model, everything[test], values[test]) < 0.5 * of_typical
    assert model.predict([]).median.shape == (0,)


@pytest.mark.parametrize("name", [*NETWORKS, "mlp", "xgboost"])
def test_missing_values_are_omitted_and_seeds_are_reproducible(name, zoo, measure):
    values = measure(zoo.graphs[:9])[:, 0]
    some = workloads(zoo)[:9]
    holed = values.copy()
    holed[[2, 5]] = np.nan
    above = np.where(np.isnan(holed), 100.0, np.nan)
    keep = ~np.isnan(holed)
    with_holes = estimator(name, 5).fit(
        some, targets(holed, zoo.names[:9], above), np.random.default_rng(0)
    )
    without = estimator(name, 5).fit(
        [w for w, k in zip(some, keep, strict=True) if k],
        targets(values[keep], np.array(zoo.names[:9])[keep]),
        np.random.default_rng(0),
    )
    np.testing.assert_array_equal(with_holes.predict(some).median, without.predict(some).median)
    with pytest.raises(InputError, match="too few"):
        estimator(name).fit(some, targets(np.full(9, np.nan), "a" * 9), np.random.default_rng(0))


def test_faketensor_is_a_robust_line(zoo):
    everything = workloads(zoo)[:40]
    generator = np.random.default_rng(0)
    estimates = generator.uniform(500, 20_000, len(everything))
    values = 1_700 + 1.2 * estimates
    spiked = values.copy()
    spiked[::8] *= 3
    peer = FakeTensor(dict(zip(everything, estimates.tolist(), strict=True)))
    model = peer.fit(everything, targets(spiked, zoo.names[:40]), generator)
    np.testing.assert_allclose(model.predict(everything[:3]).median, values[:3], rtol=0.01)
    with pytest.raises(InputError, match="FakeTensor's estimate"):
        model.predict(workloads(zoo)[:1])
