"""Workloads of the made-up graphs of conftest, with labels."""

import numpy as np

from trappm.learner.heads.physics_heads import train_heads
from trappm.learner.interface import Targets, Workload
from trappm.profiler.records import METRICS, Graph


def workloads(zoo):
    return [Workload(graph=graph) for graph in zoo.graphs]


def targets(values, names, above=None):
    above = np.full(len(values), np.nan) if above is None else above
    return Targets(values=np.asarray(values, dtype=float), above=above, groups=list(names))


def trained_heads(zoo, rows, values, preset, seed=0, groups=None, **options):
    """Heads of these graphs of the zoo, with labels (n, 3)."""
    samples, names = zoo.workloads(rows)
    return train_heads(
        samples, values[rows], groups=groups or names, preset=preset.head,
        generator=np.random.default_rng(seed), **options,
    )  # fmt: skip


def errors_percent(heads, zoo, rows, values):
    """MAPE of each metric on these rows."""
    predictions = heads.predict(zoo.workloads(rows)[0])
    columns = [list(METRICS).index(metric) for metric in predictions.metrics]
    return 100 * np.mean(np.abs(predictions.median / values[np.ix_(rows, columns)] - 1), axis=0)


def one_layer(parameters, batch_size=1):
    """A graph that no other number of parameters has."""
    shape = np.array([[batch_size, 4, 0, 0, 0, 0]])
    return Graph(
        operators=("Gemm",),
        edges=np.zeros((0, 2), dtype=np.int64),
        input_shapes=shape,
        output_shapes=shape,
        macs=np.array([batch_size * parameters]),
        parameters=np.array([parameters]),
        memory_bytes=np.array([4 * (batch_size + parameters)]),
        batch_size=batch_size,
    )


def mape(model, test, values):
    return float(np.mean(np.abs(model.predict(test).median / values - 1)))
