"""Replayed campaigns: nothing held out is chosen, pairs divide alike, design beats chance."""

from dataclasses import replace

import numpy as np
import pytest

from research.evaluation.benchmark import Samples
from research.peers.baselines import PriorAlone
from research.replay.replay import JUDGED, Bench, named_strategy, replay
from trappm.learner.acquisition import STRATEGIES
from trappm.learner.estimator import Estimate
from trappm.learner.heads.metric_head import Ours
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.profiler.errors import InputError
from trappm.profiler.records import Configuration


@pytest.fixture(scope="module")
def samples(zoo, measure):
    rows = list(range(len(zoo.graphs)))
    workloads, names = zoo.workloads(rows)
    values = measure(zoo.graphs, noise_seed=3)[:, 0]
    n = len(rows)
    return Samples(
        configurations=[
            Configuration(architecture=name, batch_size=w.batch_size, input_size=224)
            for name, w in zip(names, workloads, strict=True)
        ],
        workloads=workloads,
        values=values,
        above=np.full(n, np.nan),
        judged=np.ones(n, dtype=bool),
        spiked=np.zeros(n, dtype=bool),
    )


def bench(samples, **options):
    embeddings = np.random.default_rng(9).normal(0, 1, (len(samples), 8)).astype(np.float32)
    learner = PriorAlone(GraphPrior("step_time_ms"))
    options = {"estimator": learner, "metric": "step_time_ms", "spec": None, **options}
    return Bench(samples=samples, embeddings=embeddings, **options)


class Watching:
    """An estimator that keeps what it was given."""

    name = "watching"

    def __init__(self):
        self.seen = []

    def fit(self, workloads, targets, generator, start=None):
        self.seen.append([*targets.groups])
        return self

    def predict(self, workloads):
        return Estimate(np.ones(len(workloads)))


def test_held_out_labels_are_never_acquired(samples):
    watching = Watching()
    points = list(replay(bench(samples, estimator=watching), "random", 3, (6, 10, 15)))
    from trappm.learner.stats.errors import split_architectures

    held_out = split_architectures(samples.configurations, 0.3, np.random.default_rng(3))
    assert [len(groups) for groups in watching.seen] == [6, 10, 15] == [p.labels for p in points]
    assert watching.seen[2][:10] == watching.seen[1]
    assert not held_out & set(watching.seen[-1])
    assert points[0].seconds < points[1].seconds < points[2].seconds


@pytest.mark.parametrize("name", [*STRATEGIES, *(other.name for other in JUDGED)])
def test_every_strategy_is_reproducible(samples, name):
    if name.startswith("bmdal"):
        pytest.importorskip("bmdal_reg")
    options = {"estimator": Ours(GraphPrior("step_time_ms"))} if name == "uncertainty" else {}
    first, again = (list(replay(bench(samples, **options), name, 1, (6, 12))) for _ in range(2))
    assert first == again
    assert first[1].mape < 200


def test_ours_needs_fewer_labels_than_random(samples):
    def mean(name):
        runs = [list(replay(bench(samples), name, seed, (6, 12))) for seed in range(8)]
        return np.mean([[p.mape for p in run] for run in runs])

    assert mean("ours") < mean("random")


def test_failed_runs_use_a_label_and_are_predicted(samples, monkeypatch):
    values, above = samples.values.copy(), samples.above.copy()
    limit = np.quantile(values, 0.6)
    died = values > limit
    values[died], above[died] = np.nan, limit
    deadly = replace(samples, values=values, above=above, judged=~died)
    requests = []
    chooser = named_strategy("ours")
    select = type(chooser).select
    monkeypatch.setattr(type(chooser), "select", lambda s, r: requests.append(r) or select(s, r))

    class Sure(Watching):
        def predict(self, workloads):
            return Estimate(
                np.full(len(workloads), 2 * limit), log_std=np.full(len(workloads), 0.1)
            )

    points = list(replay(bench(deadly, estimator=Sure()), "ours", 1, (8, 16)))
    assert points[1].died >= points[0].died > 0
    assert requests[0].failure.max() < 0.9
    assert requests[1].failure.min() > 0.99


def test_invalid_replays_are_rejected(samples):
    with pytest.raises(InputError, match="cannot acquire"):
        next(replay(bench(samples), "random", 0, (10_000,)))
    with pytest.raises(InputError, match="did you mean"):
        named_strategy("rndom")
    with pytest.raises(InputError, match="did you mean 'bmdal-lcmd-gradients'"):
        named_strategy("bmdal-lcmd-gradient")
    with pytest.raises(InputError, match=r"there are: ours, .*bmdal-lcmd-gradients"):
        named_strategy("foo")
