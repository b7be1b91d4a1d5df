"""Studies begin with what is shipped, go on where they stopped, and see no held-out label."""

from dataclasses import replace

import numpy as np
import pytest
from bench_samples import bench_samples
from workload_samples import workloads

from research.evaluation.benchmark import SplitKind, splits_of
from research.tuning import Tuning, run_trials
from trappm.profiler.records import Configuration

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
