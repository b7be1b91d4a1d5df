"""Replayed campaigns: nothing held out is chosen, design beats chance; the command's figures."""

from dataclasses import replace

import numpy as np
import pytest
from bench_samples import bench_samples
from workload_samples import workloads

from research.evaluation.benchmark import SplitKind, splits_of
from research.peers.baselines import PriorAlone
from research.replay.command import (
    Job,
    ReplayPlan,
    jackknife_error,
    seconds_to_same_error,
    standard_error,
    summary,
)
from research.replay.replay import JUDGED, Bench, ReplayPoint, named_strategy, replay
from research.replay.strategies import STUDIED, ReplayRequest
from research.tuning import Tuning, run_trials
from trappm.learner.acquisition import STRATEGIES, PoolCovariance
from trappm.learner.heads.physics_heads import Ours
from trappm.learner.interface import Estimate
from trappm.learner.physics.graph_prior import GraphPrior
from trappm.learner.stats.errors import split_architectures
from trappm.profiler.records import Configuration


@pytest.fixture(scope="module")
def samples(zoo, measure):
    rows = list(range(len(zoo.graphs)))
    workloads, names = zoo.workloads(rows)
    values = measure(zoo.graphs, noise_seed=3)[:, 0]
    configurations = [
        Configuration(architecture=name, batch_size=w.batch_size, input_size=224)
        for name, w in zip(names, workloads, strict=True)
    ]
    return bench_samples(configurations, workloads, values)


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


# `python -m research replay`: pairs, areas, and their report.


@pytest.fixture
def plan(tmp_path):
    labels = tmp_path / "labels.csv"
    labels.write_text("made up")
    return ReplayPlan(
        labels=labels, metric="step_time_ms", strategies=("random", "ours"), seeds=range(6),
        budgets=(20, 40, 80),
    )  # fmt: skip


def campaign(factor, seed, seconds=100.0):
    """Errors that fall with the root of labels; seeds differ, strategies by a factor."""
    start = 20.0 + np.random.default_rng(seed).normal()
    return [
        ReplayPoint(n, factor * start * (20 / n) ** 0.5, start / 2, seconds * n / 20, 0)
        for n in (20, 40, 80)
    ]


def filled(plan):
    results = {}
    for seed in plan.seeds:
        results[Job(seed, "ours", "random")] = campaign(1.0, seed)
        results[Job(seed, "ours", "ours")] = campaign(0.8, seed, seconds=50.0)
    return results


def test_strategies_are_compared_on_the_same_seeds(plan):
    results = filled(plan)
    del results[Job(3, "ours", "ours")]
    rows = {row["strategy"]: row for row in summary(results, plan)}
    assert rows["ours"]["seeds"] == 5
    assert rows["random"]["seeds"] == 6
    assert rows["random"]["area_percent"] == pytest.approx(0.0)
    # Every pair differs by a fifth, however much the seeds differ.
    assert rows["ours"]["area_percent"] == pytest.approx(-20.0)
    assert rows["ours"]["area_error"] == pytest.approx(0.0, abs=1e-9)
    assert rows["ours"]["wins"] == 5
    # At the same error: 0.64 of the labels, each of half the seconds.
    assert rows["ours"]["seconds_percent"] == pytest.approx(-68.0, abs=2.0)
    assert 0.0 < rows["ours"]["seconds_error"] < 2.0


def test_standard_errors_account_for_overlapping_splits():
    """Three tenths judge in each split, so means of many splits scatter far more than 1/n."""
    values = np.array([1.0, 2.0, 4.0, 5.0])
    assert standard_error(values) == pytest.approx(values.std(ddof=1) * np.sqrt(1 / 4 + 3 / 7))
    assert standard_error(values[:1]) is None


def test_jackknife_error_equals_that_of_a_mean():
    splits = np.exp(np.random.default_rng(1).normal(scale=0.1, size=12))
    errors = 16.0, 8.0, 4.0
    base = [
        [ReplayPoint(n, e, e, float(n), 0) for n, e in zip((20, 40, 80), errors, strict=True)]
    ] * 12
    own = [[replace(p, seconds=float(p.labels * factor)) for p in base[0]] for factor in splits]
    percent = 100 * (splits - 1)
    assert seconds_to_same_error(own, base) == pytest.approx(percent.mean())
    assert jackknife_error(own, base) == pytest.approx(standard_error(percent))
    unknown = [[replace(p, seconds=None) for p in campaign] for campaign in own]
    assert jackknife_error(unknown, base) is None


# Strategies that only replays offer: shares of families, coverage, LCMD, and their gradients.


def request(n=60, seed=0, count=8, **options):
    """A pool of six clusters, some of it labelled."""
    generator = np.random.default_rng(seed)
    cluster = generator.choice(6, n)
    embeddings = generator.normal(0, 3, (6, 12))[cluster] + generator.normal(0, 0.5, (n, 12))
    values = {
        "embeddings": embeddings.astype(np.float32),
        "static_features": np.exp(generator.normal(3, 1, (n, 6))),
        "labelled": np.arange(0, n, 10),
        "candidates": np.arange(n),
        "count": count,
        "generator": np.random.default_rng(seed + 1),
        "families": [f"family {k}" for k in cluster],
        "covariances": [PoolCovariance(generator.normal(0, 1, (n, 10)).astype(np.float32), 0.1)],
    }
    return ReplayRequest(**{**values, **options})


def unlabelled(**options):
    """The same pool without labels."""
    return request(labelled=np.zeros(0, dtype=np.int64), **options)


def picks_of(name, query):
    return [pick.index for pick in named_strategy(name).select(query)]


@pytest.mark.parametrize("name", [strategy.name for strategy in STUDIED])
def test_only_open_candidates_are_picked_once_each(name):
    for query in (request(candidates=np.arange(0, 60, 2)), unlabelled()):
        picks = picks_of(name, query)
        assert len(set(picks)) == 8
        assert set(picks) <= set(query.open.tolist())


def test_lcmd_agrees_with_bmdal_reg(monkeypatch):
    """The reference peer, on the same vectors."""
    pytest.importorskip("bmdal_reg")
    monkeypatch.setattr(np, "Inf", np.inf, raising=False)  # bmdal_reg is older than NumPy 2
    import torch
    from bmdal_reg.bmdal.algorithms import select_batch
    from bmdal_reg.bmdal.feature_data import TensorFeatureData

    query = request(n=200, count=12)
    points = torch.from_numpy(query.points)
    theirs, _ = select_batch(
        batch_size=12,
        models=[torch.nn.Identity()],
        data={
            "train": TensorFeatureData(points[query.known]),
            "pool": TensorFeatureData(points[query.open]),
        },
        y_train=None,
        base_kernel="linear",
        kernel_transforms=[],
        selection_method="lcmd",
        sel_with_train=True,
    )
    ours = picks_of("lcmd-gradients", replace(query, gradients=query.points))
    assert query.open[theirs.numpy()].tolist() == ours


# Studies begin with what is shipped, go on where they stopped, and see no held-out label.


NAMES = [f"resnet{i}" for i in range(24)] + [f"vgg{i}" for i in range(8)]


@pytest.fixture
def tuning(zoo, measure, tmp_path):
    """Labels of 32 architectures at three batch sizes, and a database for the study."""
    names = dict(zip(dict.fromkeys(zoo.names), NAMES, strict=True))
    configurations = [
        Configuration(architecture=names[name], batch_size=graph.batch_size, input_size=16)
        for name, graph in zip(zoo.names, zoo.graphs, strict=True)
    ]
    samples = bench_samples(configurations, workloads(zoo), measure(zoo.graphs)[:, 0])
    return Tuning(f"sqlite:///{tmp_path / 'studies.db'}", "xgboost", samples, zoo.encoder)


def silent(done, total, least):
    pass


def test_held_out_labels_do_not_change_a_study(tuning):
    (split,) = splits_of(tuning.samples, SplitKind.ARCHITECTURES, [1337])
    other = replace(
        tuning.samples,
        values=np.where(split.test, tuning.samples.values[::-1], tuning.samples.values),
    )
    finished = run_trials(tuning, 2, silent)
    assert run_trials(replace(tuning, samples=other), 2, silent) == finished
