"""Workloads of the made-up graphs of conftest, with labels."""

import numpy as np

from trappm.learner.estimator import Targets
from trappm.learner.workload import Workload
from trappm.profiler.records import Graph


def workloads(zoo):
    return [Workload(graph=graph) for graph in zoo.graphs]


def targets(values, names, above=None):
    above = np.full(len(values), np.nan) if above is None else above
    return Targets(values=np.asarray(values, dtype=float), above=above, groups=list(names))


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
