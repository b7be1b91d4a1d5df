"""Splits hold out what their name says, equal models are one group, and scores are correct."""

import numpy as np
import pytest
from bench_samples import bench_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_samples import one_layer

from research.evaluation.benchmark import (
    BenchmarkPlan,
    SourceDevice,
    SplitKind,
    run_plan,
    score,
    splits_of,
    summarize,
)
from trappm.learner.interface import Estimate, Workload
from trappm.learner.stats.folds import content_groups
from trappm.profiler.errors import InputError
from trappm.profiler.models.families import family_of
from trappm.profiler.records import Configuration
from trappm.profiler.trace import trace

NAMES = [
    "resnet10t", "resnet18", "resnet26", "resnet34", "resnet50", "vgg11", "vgg13", "vgg16",
    "convnext_atto", "convnext_femto", "convnext_pico", "densenet121", "vit_tiny_patch16_224",
]  # fmt: skip


def samples(values=None, **fields):
    configurations = [
        Configuration(architecture=name, batch_size=batch, input_size=64)
        for name in NAMES
        for batch in (1, 2, 4)
    ]
    graphs = [one_layer(NAMES.index(c.architecture), c.batch_size) for c in configurations]
    return bench_samples(configurations, [Workload(graph=g) for g in graphs], values, **fields)


class Memory:
    """Predicts the mean of what it was given, and remembers everything."""

    name = "memory"

    def __init__(self):
        self.fits, self.draws = [], []

    def fit(self, workloads, targets, generator, start=None):
        self.fits.append(targets)
        self.draws.append(generator.random())
        return _Constant(np.nanmean(targets.values))


class _Constant:
    def __init__(self, value):
        self.value = value

    def predict(self, workloads):
        middle = np.full(len(workloads), self.value)
        return Estimate(median=middle, low=middle / 2, high=middle * 2)


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=25)
@pytest.mark.parametrize("kind", [k for k in SplitKind if k is not SplitKind.EACH_FAMILY])
def test_split_covers_all_rows_and_separates_groups(kind, seed):
    everything = samples()
    (split,) = splits_of(everything, kind, [seed])
    (again,) = splits_of(everything, kind, [seed])
    np.testing.assert_array_equal(split.test, again.test)
    assert np.all(split.train ^ split.test)
    assert split.train.any()
    assert split.test.any()
    names, families = np.array(everything.architectures), everything.families
    if kind is SplitKind.ARCHITECTURES:
        assert not set(names[split.train]) & set(names[split.test])
        assert set(families) == set(families[split.train])
    if kind is SplitKind.FAMILIES:
        assert not set(families[split.train]) & set(families[split.test])
    if kind is SplitKind.CONFIGURATIONS:
        for family in set(families):
            members = families == family
            assert split.test[members].sum() == round(0.3 * members.sum())


def test_each_family_of_three_or_more_architectures_is_left_out_once():
    everything = samples()
    splits = list(splits_of(everything, SplitKind.EACH_FAMILY, [1337, 1338]))
    left_out = [set(everything.families[split.test]) for split in splits]
    assert left_out == [{"convnext"}, {"resnet"}, {"vgg"}]
    assert all(np.all(split.train ^ split.test) for split in splits)


def test_training_excludes_held_out_rows_and_draws_are_nested():
    everything, estimator = samples(), Memory()
    plan = BenchmarkPlan(splits=[SplitKind.ARCHITECTURES], seeds=[1337, 1338], label_counts=[4, 9])
    messages = []
    runs = list(run_plan(everything, [estimator], plan, lambda *p: messages.append(p)))
    assert [(run.seed, run.labels) for run in runs] == [
        (1337, None), (1337, 4), (1337, 9), (1338, None), (1338, 4), (1338, 9),
    ]  # fmt: skip
    for run, targets in zip(runs, estimator.fits, strict=True):
        test = {everything.architectures[i] for i in run.test}
        assert not test & set(targets.groups)
        assert len(run.test) + len(targets.values) == len(everything) or run.labels
        assert run.labels in {None, len(targets.values)}
    assert set(estimator.fits[1].values) < set(estimator.fits[2].values)
    assert messages[0][:2] == (0, 6)
    assert messages[-1][:2] == (6, 6)


@pytest.mark.parametrize("kind", SplitKind)
def test_start_has_not_seen_held_out_labels_on_the_other_device(kind):
    estimator, other = Memory(), Memory()
    here, there = samples(), samples()
    plan = BenchmarkPlan(splits=[kind], seeds=[1, 2], source=SourceDevice(there, {"memory": other}))
    runs = [run for run in run_plan(here, [estimator], plan) if run.transferred]
    assert len(other.fits) == len(runs)
    for run, seen in zip(runs, other.fits, strict=True):
        assert not set(here.values[run.test]) & set(seen.values)
        held_out = {here.architectures[i] for i in run.test}
        if kind is not SplitKind.CONFIGURATIONS:
            assert set(seen.groups) == set(there.architectures) - held_out


def test_scores_use_judged_rows_and_report_oom_and_spikes():
    n = 3 * len(NAMES)
    values, above = np.full(n, 100.0), np.full(n, np.nan)
    values[:2], above[:2] = np.nan, 150.0
    values[2] = 200.0  # judged, above the capacity in truth and prediction
    judged, spiked = ~np.isnan(values), np.zeros(n, dtype=bool)
    judged[3], spiked[4] = False, True
    everything = samples(values=values, above=above, judged=judged, spiked=spiked)
    test = np.arange(8)
    median = np.array([160.0, 90, 200, 999, 300, 110, 100, 100])
    scores = score(everything, test, Estimate(median=median))
    assert scores["accuracy"]["count"] == 5
    assert scores["accuracy"]["mape"] == pytest.approx((0 + 200 + 10 + 0 + 0) / 5)
    assert scores["without_spikes"]["mape"] == pytest.approx(10 / 4)
    # Foretold: the first, the third and the spike; the fourth is not judged.
    assert scores["out_of_memory"]["precision"] == pytest.approx(1 / 3)
    assert scores["out_of_memory"]["recall"] == pytest.approx(1 / 2)
    assert {family: a["count"] for family, a in scores["by_family"].items()} == {"resnet": 5}
    assert family_of(NAMES[0]) == "resnet"
    median = median.copy()
    median[0] = np.nan
    with pytest.raises(InputError, match="1 of"):
        score(everything, test, Estimate(median=median))


def test_a_summary_has_mean_and_deviation_over_seeds():
    plan = BenchmarkPlan(splits=[SplitKind.ARCHITECTURES, SplitKind.EACH_FAMILY], seeds=[1, 2, 3])
    everything = samples()
    runs = list(run_plan(everything, [Memory()], plan))
    honest, families = summarize(everything, runs)
    errors = [score(everything, r.test, r.estimate)["accuracy"]["mape"] for r in runs[:3]]
    assert honest["seeds"] == [1, 2, 3]
    assert honest["accuracy"]["mape"] == pytest.approx(np.mean(errors))
    assert honest["accuracy_deviation"]["mape"] == pytest.approx(np.std(errors, ddof=1))
    assert honest["accuracy"]["coverage"] is not None
    assert set(families["by_family"]) == {"convnext", "resnet", "vgg"}
    assert families["accuracy_deviation"] == {}


# Architectures under two names are one, wherever some are held out.


@pytest.mark.parametrize(
    ("first", "second", "are_equal"),
    [
        ("deit_tiny_patch16_224", "vit_tiny_patch16_224", True),
        ("tf_mobilenetv3_small_075", "tf_mobilenetv3_small_100", False),
    ],
)
def test_timm_names_with_equal_layers_are_one_group(first, second, are_equal):
    graphs = [trace(first, 224).graph.at(8), trace(second, 224).graph.at(32)]
    pair = [Workload(graph=graph) for graph in graphs]
    groups = content_groups([first, second], pair)
    assert groups == ([first, first] if are_equal else [first, second])
    assert content_groups([second, first], pair[::-1]) == groups[::-1]


# The layers are those of the numbers: a ViT is a DeiT, of another family.
LAYERS = {
    "vit_a": 1, "vit_b": 2, "vit_c": 3, "deit_a": 1, "deit_b": 4, "deit_c": 5,
    "resnet18": 6, "tv_resnet18": 6, "resnet34": 7, "resnet50": 8, "resnet101": 9,
}  # fmt: skip


@pytest.fixture
def twin_samples():
    configurations = [
        Configuration(architecture=name, batch_size=batch, input_size=64)
        for name in LAYERS
        for batch in (1, 2)
    ]
    graphs = [one_layer(LAYERS[c.architecture], c.batch_size) for c in configurations]
    return bench_samples(configurations, [Workload(graph=graph) for graph in graphs])


@pytest.mark.parametrize("kind", [k for k in SplitKind if k is not SplitKind.CONFIGURATIONS])
def test_duplicates_of_held_out_rows_are_not_trained_on(twin_samples, kind):
    layers = np.array([LAYERS[name] for name in twin_samples.architectures])
    divided = 0
    for split in splits_of(twin_samples, kind, range(20)):
        assert not set(layers[split.train]) & set(layers[split.test])
        assert not (split.train & split.test).any()
        divided += not (split.train | split.test).all()
    # Whole families hold a twin of another family out, which then teaches nothing either.
    assert (divided > 0) == (kind is not SplitKind.ARCHITECTURES)
